"""What a training function depends on: its own code, the functions, classes and modules of the user's that it reaches,
and the values of the globals, closure variables and defaults that they read.

`fingerprint` digests what would run and not how it is written: byte code without line numbers and docstrings, so that
comments and formatting do not count, and values by content. Nothing in it may differ between two processes that run the
same script: no `id`, no `repr` with an address, no order of a set or a dict. Libraries (the standard library, what is
installed in site-packages, Holdfast itself) count by name only. Work is bounded: beyond some number of values, and
for large arrays, the type and the size stand for the content. `holdfast.control.fingerprint` keeps and compares these.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import importlib.machinery
import inspect
import os
import re
import site
import sys
import sysconfig
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.control.fingerprint import Fingerprint, Value
from holdfast.core.masking import MASK, masked

__all__ = ["fingerprint", "is_own_module"]

_VALUES_MAX = 50_000
_OBJECTS_MAX = 2_000
"""Functions, classes and modules that are looked at."""
_ITEMS_MAX = 10_000
"""A longer container counts by its type and length."""
_OBJECT_ITEMS_MAX = 100
"""The same inside a user's object, which is more often data than a setting."""
_ARRAY_BYTES_MAX = 1 << 20
_SHOWN_MAX = 60
_DEPTH_MAX = 24
_CACHED = type(functools.lru_cache(lambda: None))
_MAIN = ("__main__", "__mp_main__")
_HAS_DOCSTRING = getattr(inspect, "CO_HAS_DOCSTRING", 0)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_TEMPORARY = re.compile(r"(?<![A-Za-z0-9])tmp[a-z0-9_]{8}(?![A-Za-z0-9])")
_TEXTUAL = {
    *("datetime.date", "datetime.timedelta", "datetime.timezone", "decimal.Decimal", "fractions.Fraction"),
    *(
        "uuid.UUID",
        "zoneinfo.ZoneInfo",
        "torch.device",
        "torch.dtype",
        "torch.Size",
        "builtins.range",
        "builtins.slice",
    ),
}
"""Types whose `str` is the same for the same value in every process."""


def fingerprint(function: Callable[..., Any], config: Mapping[str, Any] | None) -> Fingerprint:
    """The fingerprint of a training function and its configuration."""
    collector = _Collector()
    name = collector.reach(function)
    values = {key: collector.value(key, item) for key, item in _leaves(config or {})}
    collector.finish()
    return Fingerprint(
        function=name,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        code=dict(sorted(collector.code.items())),
        values=dict(sorted(collector.values.items())),
        config=values,
    )


def _leaves(config: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value and depth < _DEPTH_MAX:
            yield from _leaves(value, f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", value


class _Collector:
    """One walk over everything that is reached. Values are digested as they are met, code is queued."""

    def __init__(self) -> None:
        self.code: dict[str, str] = {}
        self.values: dict[str, Value] = {}
        self._names: dict[int, str] = {}
        """By `id`: the name of each function and class that was met. `_kept` keeps them alive, and so the ids apart."""
        self._kept: list[Any] = []
        self._taken: dict[str, int] = {}
        self._queue: deque[Callable[[], None]] = deque()
        self._attributes: set[tuple[int, str]] = set()
        self._modules: set[str] = set()
        self._left = _VALUES_MAX
        self._open: set[int] = set()
        """Containers that are being digested: whoever comes back to one has gone round in a circle."""
        now = time.time()
        self._process = (now - _process_age_s() - 1, now + 1)

    def finish(self) -> None:
        while self._queue:
            self._queue.popleft()()

    # ------------------------------------------------------------------ code

    def reach(self, target: Any) -> str:
        """The name of a function, class or other callable; what it consists of is looked at later."""
        if isinstance(target, _CACHED):
            return self.reach(target.__wrapped__)
        known = self._names.get(id(target))
        if known is not None:
            return known
        self._kept.append(target)
        name = self._names[id(target)] = self._new_name(target)
        if len(self._kept) > _OBJECTS_MAX:
            return name
        if isinstance(target, types.FunctionType):
            if is_own_module(target.__module__):
                self._queue.append(lambda: self._visit_function(target, name))
        elif isinstance(target, type):
            if is_own_module(target.__module__):
                self._queue.append(lambda: self._visit_class(target, name))
        elif isinstance(target, functools.partial):
            self._queue.append(lambda: self._visit_partial(target, name))
        elif isinstance(target, types.MethodType):
            self._queue.append(lambda: self._visit_method(target, name))
        elif not isinstance(target, types.BuiltinFunctionType) and is_own_module(type(target).__module__):
            self._queue.append(lambda: self._visit_instance(target, name))
        return name

    def _new_name(self, target: Any) -> str:
        named = target if hasattr(target, "__qualname__") else type(target)
        if isinstance(target, functools.partial):
            named = target.func if hasattr(target.func, "__qualname__") else type(target.func)
        module = str(getattr(named, "__module__", None) or "")
        name = str(named.__qualname__)
        name = name if module in ("", "builtins", *_MAIN) else f"{module}.{name}"
        count = self._taken[name] = self._taken.get(name, 0) + 1
        return name if count == 1 else f"{name}#{count}"  # lambdas of one line, functions of one factory

    def _visit_function(self, function: types.FunctionType, name: str) -> None:
        code = function.__code__
        self.code[name] = _hex(_code_digest(code))
        self._visit_code(code, function.__globals__)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # not bound yet
                self._note(f"{variable} in {name}", variable, cell.cell_contents)
        parameters = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ or ()
        for parameter, value in zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True):
            self._note(f"{parameter} of {name}", parameter, value)
        for parameter, value in sorted((function.__kwdefaults__ or {}).items()):
            self._note(f"{parameter} of {name}", parameter, value)

    def _visit_code(self, code: types.CodeType, space: Mapping[str, Any]) -> None:
        """The globals that byte code reads, and the modules that it imports."""
        names, imports, attributes = _names_in(code)
        for name in sorted(names):
            if name in space:
                self._visit_global(space, name, attributes)
        package = space.get("__package__") or ""
        self._visit_imports(imports, attributes, package)

    def _visit_global(self, space: Mapping[str, Any], name: str, attributes: frozenset[str]) -> None:
        module = str(space.get("__name__", ""))
        label = name if module in _MAIN or not module else f"{module}.{name}"
        value = space[name]
        if _hides_its_class(value) or not isinstance(value, types.ModuleType) or not is_own_module(value.__name__):
            self._note(label, name, value)
        else:
            # Of a module of the user's counts what the code may mean by `module.name`.
            for attribute in sorted(attributes & vars(value).keys()):
                if (id(value), attribute) not in self._attributes:
                    self._attributes.add((id(value), attribute))
                    self._visit_global(vars(value), attribute, attributes)

    def _visit_imports(self, names: Iterable[str], attributes: frozenset[str], package: str) -> None:
        """Whatever `import name`, `from name import attribute` and `from .name import attribute` may mean."""
        for name in sorted(names):
            for meant in (name, f"{package}.{name}".rstrip(".")) if package else (name,):
                if meant and self._visit_import(meant):
                    for attribute in sorted(attributes):
                        self._visit_import(f"{meant}.{attribute}")

    def _visit_import(self, name: str) -> bool:
        """A module that is imported when the function runs: its file counts as a whole, whether it is loaded here or
        not, so that it never depends on what else was imported. Whether it is a package of the user's."""
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top == "holdfast" or name in self._modules:
            return False
        self._modules.add(name)
        path: list[str] | None = None
        for end in [at for at, letter in enumerate(name) if letter == "."] + [len(name)]:
            spec = importlib.machinery.PathFinder.find_spec(name[:end], path)
            if spec is None or len(self._modules) > _OBJECTS_MAX:
                return False
            path = list(spec.submodule_search_locations or ())
            if spec.origin is not None and _is_library_file(spec.origin):
                return False
            if spec.origin is not None and spec.origin.endswith(".py"):
                self._modules.add(name[:end])
                self._queue.append(functools.partial(self._visit_file, name[:end], spec.origin, bool(path)))
        return bool(path)

    def _visit_file(self, name: str, file: str, is_package: bool) -> None:
        with suppress(OSError, SyntaxError, ValueError):  # the worker will say what is wrong with it
            code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
            self.code[f"module {name}"] = _hex(_code_digest(code))
            _, imports, attributes = _names_in(code)
            self._visit_imports(imports, attributes, name if is_package else name.rpartition(".")[0])

    def _visit_class(self, cls: type, name: str) -> None:
        bases = [self.reach(base) for base in cls.__bases__]
        members = {} if issubclass(cls, enum.Enum) else _settings_of(cls)
        pairs = ((key, one) for key, value in vars(cls).items() for one in _functions_of(value))
        functions = sorted(pairs, key=lambda pair: pair[0])
        parts = [*bases, *(key for key, _ in functions), *sorted(members)]
        self.code[name] = _hex(_combine("class", (part.encode() for part in parts)))
        for key, function in functions:
            if isinstance(function, types.FunctionType) and is_own_module(function.__module__):
                self.reach(function)
            else:
                self._note(f"{name}.{key}", key, function)
        for key, value in sorted(members.items()):
            self._note(f"{name}.{key}", key, value)
        if issubclass(cls, enum.Enum):
            for key, member in cls.__members__.items():
                self._note(f"{name}.{key}", key, member._value_)

    def _visit_partial(self, partial: functools.partial[Any], name: str) -> None:
        self.reach(partial.func)
        for at, value in enumerate(partial.args):
            self._note(f"argument {at} of {name}", "", value)
        for key, value in sorted(partial.keywords.items()):
            self._note(f"{key} of {name}", key, value)

    def _visit_method(self, method: types.MethodType, name: str) -> None:
        self.reach(method.__func__)
        self._note(f"self of {name}", "", method.__self__)

    def _visit_instance(self, instance: Any, name: str) -> None:
        self.reach(type(instance))
        self._note(f"self of {name}", "", instance)

    # ------------------------------------------------------------------ values

    def value(self, name: str, value: Any) -> Value:
        """The value that is known by `name`, which tells whether it is a secret."""
        try:
            shown = masked(name, value)
        except Exception:  # noqa: BLE001  of what cannot be looked at nobody knows that it is no secret
            return Value(self._digest(value, 0), None, True)
        secret = shown is not value
        return Value(self._digest(value, 0), MASK if secret and not isinstance(shown, str) else _shown(shown), secret)

    def _note(self, label: str, name: str, value: Any) -> None:
        if _is_code(value):
            found = self.reach(value)
            if found != label:  # under another name, or of a library: which one it is counts
                self.values[label] = Value(_digest_of("callable", found), found)
        elif label not in self.values:
            self.values[label] = self.value(name, value)

    def _digest(self, value: Any, depth: int, in_object: bool = False) -> bytes:
        """The content of a value, the same in every process; of what has no such thing, its type."""
        self._left -= 1
        if _hides_its_class(value):
            return _digest_of("type", _type_name(value))
        if (leaf := self._leaf(value)) is not None:
            return leaf
        if depth > _DEPTH_MAX or self._left < 0 or id(value) in self._open:
            return _digest_of("type", _type_name(value))
        self._open.add(id(value))
        try:
            return self._content(value, depth, in_object)
        except Exception:  # noqa: BLE001  somebody's class: its length or items may raise anything
            return _digest_of("type", _type_name(value))
        finally:
            self._open.discard(id(value))

    def _leaf(self, value: Any) -> bytes | None:
        if value is None or isinstance(value, bool) or value is Ellipsis or value is NotImplemented:
            return _digest_of("constant", str(value))
        if isinstance(value, enum.Enum):
            return _combine("enum", [self.reach(type(value)).encode(), value.name.encode()])
        if isinstance(value, int):
            return _digest_of("int", "now" if self._is_now(value) else int.__repr__(value))
        if isinstance(value, float):
            return _digest_of("float", "now" if self._is_now(value) else float.__repr__(value))
        if isinstance(value, str):
            return _digest_of("str", _TEMPORARY.sub("tmp", str.__str__(value)))
        if isinstance(value, bytes | bytearray):
            return _digest_of("bytes", bytes(value))
        if isinstance(value, complex):
            return _digest_of("complex", complex.__repr__(value))
        return None

    def _is_now(self, number: float) -> bool:
        """Whether this is the time at which this process did something, in s, ms or ns: the next one will have another,
        and the script is still the same."""
        return any(self._process[0] * unit <= number <= self._process[1] * unit for unit in (1, 10**3, 10**9))

    def _content(self, value: Any, depth: int, in_object: bool) -> bytes:
        kind = _type_name(value)
        limit = _OBJECT_ITEMS_MAX if in_object else _ITEMS_MAX
        if isinstance(value, list | tuple | set | frozenset | deque | Mapping):
            if len(value) > limit:
                return _digest_of("long", f"{kind} {len(value)}")
            return self._container(kind, value, depth, in_object)
        if isinstance(value, types.ModuleType):
            return _digest_of("module", value.__name__)
        if isinstance(value, os.PathLike):
            return _digest_of("path", _TEMPORARY.sub("tmp", str(os.fspath(value))))
        if kind == "datetime.datetime":
            return _digest_of("time", "now" if self._is_now(value.timestamp()) else str(value))
        if kind in _TEXTUAL or kind.startswith("numpy.dtype"):
            return _digest_of(kind, str(value))
        if isinstance(value, re.Pattern):
            return _digest_of(kind, f"{value.pattern!r} {value.flags}")
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            return _array_digest(value, kind, with_content=not in_object)
        if _is_code(value):
            return _digest_of("callable", self.reach(value))
        return self._object(value, kind, depth)

    def _container(self, kind: str, value: Any, depth: int, in_object: bool) -> bytes:
        if isinstance(value, Mapping):
            # By key and not in the order of insertion, which may come from a set.
            pairs = (
                self._digest(key, depth + 1, in_object) + self._digest(item, depth + 1, in_object)
                for key, item in value.items()
            )
            return _combine(kind, sorted(pairs))
        items = [self._digest(item, depth + 1, in_object) for item in value]
        return _combine(kind, sorted(items) if isinstance(value, set | frozenset) else items)

    def _object(self, value: Any, kind: str, depth: int) -> bytes:
        if _is_torch_module(value):
            # Weights are random before training: the architecture counts.
            for part in value.modules():
                if is_own_module(type(part).__module__):
                    self.reach(type(part))
            shapes = [f"{key} {tuple(one.shape)} {one.dtype}" for key, one in value.state_dict().items()]
            return _digest_of("module", "\n".join([_ADDRESS.sub("", repr(value)), *shapes]))
        if kind in ("argparse.Namespace", "types.SimpleNamespace"):
            return _combine(kind, [self._digest(vars(value), depth + 1)])
        if not is_own_module(type(value).__module__):
            return _digest_of("type", kind)
        slots = [slot for cls in type(value).__mro__ for slot in _slots_of(cls) if hasattr(value, slot)]
        state = {slot: getattr(value, slot) for slot in slots} | dict(getattr(value, "__dict__", {}))
        return _combine(self.reach(type(value)), [self._digest(state, depth + 1, in_object=True)])


# ---------------------------------------------------------------------- pieces


def _digest_of(kind: str, content: str | bytes) -> bytes:
    data = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    return hashlib.blake2b(kind.encode() + b"\0" + data, digest_size=16).digest()


def _combine(kind: str, parts: Iterable[bytes]) -> bytes:
    return _digest_of(kind, b"".join(hashlib.blake2b(part, digest_size=16).digest() for part in parts))


def _hex(digest: bytes) -> str:
    return digest.hex()[:16]


def _code_digest(code: types.CodeType) -> bytes:
    """Byte code and what it refers to, without lines, names of files, and docstrings."""
    constants = list(code.co_consts)
    if constants and isinstance(constants[0], str) and _first_is_docstring(code):
        constants[0] = None
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & ~_HAS_DOCSTRING)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    table = getattr(code, "co_exceptiontable", b"")
    parts = [code.co_code, table, repr((shape, names)).encode(), *map(_constant_digest, constants)]
    return _combine("code", parts)


def _first_is_docstring(code: types.CodeType) -> bool:
    if _HAS_DOCSTRING:
        return bool(code.co_flags & _HAS_DOCSTRING)
    return bool(code.co_flags & inspect.CO_NEWLOCALS) and not code.co_name.startswith("<")


def _constant_digest(constant: Any) -> bytes:
    if isinstance(constant, types.CodeType):
        return _code_digest(constant)
    if isinstance(constant, tuple):
        return _combine("tuple", map(_constant_digest, constant))
    if isinstance(constant, frozenset):
        return _combine("frozenset", sorted(map(_constant_digest, constant)))
    return _digest_of(type(constant).__name__, repr(constant))


def _names_in(code: types.CodeType) -> tuple[set[str], set[str], frozenset[str]]:
    """The globals that are read, the modules that are imported, and every name that may be an attribute; nested
    functions, classes and comprehensions included."""
    names: set[str] = set()
    imports: set[str] = set()
    attributes: set[str] = set()
    codes = [code]
    while codes:
        one = codes.pop()
        codes += [constant for constant in one.co_consts if isinstance(constant, types.CodeType)]
        attributes.update(one.co_names)
        for instruction in dis.get_instructions(one):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                names.add(str(instruction.argval))
            elif instruction.opname == "IMPORT_NAME":
                imports.add(str(instruction.argval))
    return names, imports, frozenset(attributes)


def _functions_of(member: Any) -> list[Any]:
    """The functions behind an entry of a class's namespace."""
    if _hides_its_class(member):
        return []
    if isinstance(member, staticmethod | classmethod):
        return [member.__func__]
    if isinstance(member, property):
        return [one for one in (member.fget, member.fset, member.fdel) if one is not None]
    if isinstance(member, functools.cached_property):
        return [member.func]
    return [member] if isinstance(member, types.FunctionType) else []


def _settings_of(cls: type) -> dict[str, Any]:
    """A class's attributes that are values; what Python and libraries put there is left out."""
    return {
        key: value
        for key, value in vars(cls).items()
        if not (key.startswith("__") and key.endswith("__"))
        and not _functions_of(value)
        and (_hides_its_class(value) or not inspect.isdatadescriptor(value))
    }


def _slots_of(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _hides_its_class(value: Any) -> bool:
    """Whether it cannot even be asked what it is: a stand-in for what is not there yet, such as settings that are read
    later on, or the request of a web server. It counts by its type."""
    try:
        value.__class__  # noqa: B018  what isinstance() looks at
    except Exception:  # noqa: BLE001  whatever it raises while there is nothing behind it
        return True
    return False


def _is_code(value: Any) -> bool:
    if _hides_its_class(value):
        return False
    kinds = (types.FunctionType, type, types.MethodType, functools.partial, types.BuiltinFunctionType, _CACHED)
    return isinstance(value, kinds)


def _is_torch_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "nn") and isinstance(value, torch.nn.Module)


def _array_digest(value: Any, kind: str, *, with_content: bool) -> bytes:
    """A numpy array, a torch tensor, or what looks like one. Large ones count by type and shape."""
    look = f"{kind} {value.dtype} {tuple(value.shape)}"
    size_bytes = getattr(value, "nbytes", None)
    if not with_content or not isinstance(size_bytes, int) or size_bytes > _ARRAY_BYTES_MAX:
        return _digest_of("array", look)
    if kind.startswith("torch."):
        import torch

        if value.device.type != "cpu" or value.layout != torch.strided:
            return _digest_of("array", look)
        value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    if getattr(value.dtype, "hasobject", False):
        return _digest_of("array", f"{look} {value.tolist()!r}" if _ADDRESS.search(repr(value)) is None else look)
    return _digest_of(look, value.tobytes())


def _shown(value: Any) -> str | None:
    """A short value as Python writes it; None for what is long, or has no text of its own."""
    if isinstance(value, enum.Enum) or not _is_plain(value, 3):
        return None
    is_set = isinstance(value, set | frozenset) and value
    text = "{" + ", ".join(sorted(map(repr, value))) + "}" if is_set else repr(value)
    return text if len(text) <= _SHOWN_MAX and text.isprintable() else None


def _is_plain(value: Any, depth: int) -> bool:
    if value is None or isinstance(value, bool | int | float | str):
        return True
    if depth == 0 or not isinstance(value, list | tuple | dict | set | frozenset) or len(value) > _SHOWN_MAX:
        return False
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return all(_is_plain(item, depth - 1) for item in items)


def _process_age_s() -> float:
    started_ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def is_own_module(module: str | None) -> bool:
    """Whether a module is the user's own: not part of Python, not installed, and not Holdfast."""
    if module is None or module in _MAIN:
        return True
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("builtins", "holdfast"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or getattr(sys.modules.get(top), "__file__", None)
    return file is None or not _is_library_file(file)


def _is_library_file(file: str) -> bool:
    path = os.path.abspath(file)  # noqa: PTH100  symbolic links are left as they are
    return path.startswith(_library_directories()) or "/site-packages/" in path or "/dist-packages/" in path


@functools.cache
def _library_directories() -> tuple[str, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple({os.path.join(path, "") for path in [*paths, *site.getsitepackages()] if path})  # noqa: PTH118
