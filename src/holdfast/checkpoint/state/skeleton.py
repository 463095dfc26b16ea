"""`state.json`: the structure of a state with its plain values, and references where tensors belong.

Built from the tokens of `flatten`, once for each structure: later states of that structure only fill their plain values
into its slots. Reading checks every node, for the file may come from anywhere; the leaves are the reader's (`load`).
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from holdfast.checkpoint.state.flatten import COUNTER, DEPTH_MAX, DICT, LEAF, OBJECT, PLAIN, TUPLE
from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.errors import Damaged, UnsupportedFormat

__all__ = ["FILE", "FORMAT", "VERSION", "Skeleton", "read_document", "restore"]

FILE = "state.json"
FORMAT = "holdfast-state"
VERSION = 1

_Path = tuple[str, ...]
_FLOATS = {"nan", "inf", "-inf"}


class Skeleton:
    """The JSON document of every state of one structure."""

    def __init__(self, tokens: Sequence[Any], reference: Callable[[int, Any, _Path], dict[str, Any]]) -> None:
        """`reference` gives what stands for a leaf: from its number, its description and its path."""
        self._reference = reference
        self._slots: list[tuple[Any, Any]] = []
        self._leaves = 0
        self._document: dict[str, Any] = {"format": FORMAT, "version": VERSION, "files": []}
        self._build(iter(tokens), self._document, "state", ())

    def encode(self, plains: Sequence[Any], files: Sequence[str]) -> bytes:
        """The document with these plain values. Not for two threads at once."""
        self._document["files"] = list(files)
        for (container, key), value in zip(self._slots, plains, strict=True):
            container[key] = value
        return msgspec.json.encode(self._document)

    def _build(self, tokens: Iterator[Any], container: Any, key: Any, path: _Path) -> None:
        token = next(tokens)
        if token == PLAIN:
            container[key] = None
            self._slots.append((container, key))
        elif token == LEAF:
            container[key] = self._reference(self._leaves, next(tokens), path)
            self._leaves += 1
        elif token == OBJECT:
            found: dict[str, Any] = {}
            container[key] = found
            for _ in range(next(tokens)):
                name = next(tokens)
                self._build(tokens, found, name, (*path, name))
        elif token in (DICT, COUNTER):
            pairs: list[list[Any]] = []
            container[key] = {"$dict" if token == DICT else "$counter": pairs}
            for _ in range(next(tokens)):
                name = next(tokens)
                pairs.append([name if type(name) is str else msgspec.json.decode(name), None])
                self._build(tokens, pairs[-1], 1, (*path, _spell(name)))
        else:
            items: list[Any] = [None] * next(tokens)
            container[key] = {"$tuple": items} if token == TUPLE else items
            for at in range(len(items)):
                self._build(tokens, items, at, (*path, str(at)))


def _spell(key: str | bytes) -> str:
    """A key as part of a tensor's name: what it is in JSON, without the quotes."""
    return key if isinstance(key, str) else key.decode()


def read_document(data: bytes | memoryview, where: str) -> dict[str, Any]:
    """The outermost object of a `state.json`, with its version checked."""
    try:
        document = msgspec.json.decode(data)
    except DECODE_ERRORS as error:
        raise Damaged(f"{where} is no JSON ({error}): use another checkpoint.") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT or "state" not in document:
        raise Damaged(f"{where} does not describe a state: use another checkpoint.")
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise Damaged(f"{where} has no proper version: use another checkpoint.")
    if version > VERSION:
        raise UnsupportedFormat(f"{where} has version {version}, and this Holdfast reads up to {VERSION}: upgrade it.")
    files = document.get("files")
    if type(files) is not list or not all(type(name) is str for name in files) or len(set(files)) != len(files):
        raise Damaged(f"{where} has no proper list of files: use another checkpoint.")
    return document


def restore(node: Any, leaf: Callable[[dict[str, Any]], Any], where: str) -> Any:
    """The state that the JSON value `node` describes; `leaf` gives what a framework's tag stands for."""
    return _Reader(leaf, where).value(node, 0)


class _Reader:
    """One pass over the JSON. Everything unexpected is `Damaged`: only a faulty disk or a forger writes it."""

    def __init__(self, leaf: Callable[[dict[str, Any]], Any], where: str) -> None:
        self._leaf = leaf
        self._where = where

    def value(self, node: Any, depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise self._damaged(f"it is nested deeper than {DEPTH_MAX} levels")
        if type(node) is list:
            return [self.value(item, depth + 1) for item in node]
        if type(node) is not dict:
            return node
        tag = next((key for key in node if key.startswith("$")), None)
        if tag is None:
            return {key: self.value(item, depth + 1) for key, item in node.items()}
        return self._tagged(tag, node, depth)

    def _tagged(self, tag: str, node: dict[str, Any], depth: int) -> Any:
        content = node[tag]
        if tag in ("$tuple", "$dict", "$counter"):
            if type(content) is not list:
                raise self._damaged(f"{tag} holds no list")
            if tag == "$tuple":
                return tuple([self.value(item, depth + 1) for item in content])
            pairs = self._pairs(content, depth)
            return pairs if tag == "$dict" else Counter(pairs)
        if tag in ("$float", "$int", "$bytes"):
            return self._plain(tag, content)
        return self._leaf(node)

    def _pairs(self, content: list[Any], depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for pair in content:
            if type(pair) is not list or len(pair) != 2:
                raise self._damaged("a dict's item is no pair")
            key = self._key(pair[0], depth)
            if key in found:
                raise self._damaged(f"the key {key!r} occurs twice")
            found[key] = self.value(pair[1], depth + 1)
        return found

    def _key(self, node: Any, depth: int) -> Any:
        if type(node) is list or depth > DEPTH_MAX:
            raise self._damaged("a key is a list")
        if type(node) is not dict:
            return node
        (tag, content), *more = node.items() or [("", None)]
        if tag == "$tuple" and type(content) is list and not more:
            return tuple([self._key(item, depth + 1) for item in content])
        if tag in ("$float", "$int") and not more:
            return self._plain(tag, content)
        raise self._damaged("a key is neither plain nor a tuple")

    def _plain(self, tag: str, content: Any) -> Any:
        try:
            if type(content) is not str:
                raise ValueError("it is no string")
            if tag == "$bytes":
                return base64.b64decode(content, validate=True)
            if tag == "$int":
                return int(content, 16)
            if content not in _FLOATS:
                raise ValueError("it is a number that needs no tag")
            return float(content)
        except (ValueError, binascii.Error) as error:
            raise self._damaged(f"{tag} holds nonsense ({error})") from None

    def _damaged(self, reason: str) -> Damaged:
        return Damaged(f"{self._where} does not describe a state ({reason}): use another checkpoint.")
