#!/usr/bin/env bash
# Run the tests as an ordinary user whose home directory has a path of 60 characters, in a fresh clone of what is
# committed here: tools/test-as-user.sh [COMMAND...], `make test` unless a command is given. Needs root; the user, the
# home directory and every process of that user are gone afterwards. What is not committed is not tested.
set -euo pipefail

if [ "$(id -u)" -ne 0 ]; then
    echo "test-as-user: only root can make a user; as yourself: make test" >&2
    exit 1
fi
repository=$(cd "$(dirname "$0")/.." && pwd)
user="hf-test-$$"
home="/home/$user-"
while [ "${#home}" -lt 60 ]; do home="${home}x"; done

remove() {
    pkill -KILL -u "$user" || true # nobody else is that user
    userdel --remove "$user" 2>/dev/null || true
    rm -rf "$home" "/tmp/pytest-of-$user" "/tmp/holdfast-$uid"
}
useradd --create-home --home-dir "$home" --shell /bin/bash "$user"
uid=$(id -u "$user")
trap remove EXIT

git clone --quiet "$repository" "$home/holdfast"
# Where packages come from is the machine's business, not a part of the test.
if [ -f "$HOME/.config/pip/pip.conf" ]; then
    mkdir -p "$home/.config/pip"
    cp "$HOME/.config/pip/pip.conf" "$home/.config/pip/"
fi
[ -f "$HOME/.npmrc" ] && cp "$HOME/.npmrc" "$home/"
chown -R "$user:" "$home"

mapfile -t passed < <(env | grep -E '^(PIP_|npm_config_|NODE_EXTRA_CA_CERTS=|SSL_CERT_FILE=|[a-zA-Z]+_(proxy|PROXY)=)' || true)
[ $# -gt 0 ] || set -- make test
cd "$home/holdfast"
# PYTHON: one that this user may run, unlike root's own.
runuser -u "$user" -- env -i HOME="$home" USER="$user" LOGNAME="$user" LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin \
    "${passed[@]}" PYTHON=/usr/bin/python3 "$@" </dev/null
