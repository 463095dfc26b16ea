"""A search space taken apart, and one configuration of it: grids crossed, domains drawn, functions called.

`Space` finds the parts once; `Space.resolve` makes the configuration that a generator and a place in the grid stand
for, so any trial's configuration can be made without those before it. Domains may be nested in dicts, lists and tuples,
and in the values of `choice` and `grid_search`.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.errors import ConfigError
from holdfast.tune.search.sample import Domain, Function
from holdfast.tune.user_code import is_signal

__all__ = ["Path", "Space", "grid_search", "has_unresolved_values", "merge_configs", "spell_path"]

Path = tuple[Any, ...]
_GRID = "grid_search"


def grid_search(values: Any) -> dict[str, Any]:
    """Every one of these values; several grids are crossed."""
    if isinstance(values, Mapping | str | bytes) or not hasattr(values, "__iter__"):
        raise ConfigError(f"tune.grid_search(values) must be a list of values, not {values!r}.")
    values = list(values)
    if not values:
        raise ConfigError("tune.grid_search([]) has nothing to search: give it at least one value.")
    return {_GRID: values}


class Space:
    """The grids, domains and functions of a search space, by path, in the order in which they stand there."""

    def __init__(self, space: Mapping[str, Any] | None) -> None:
        if not isinstance(space, Mapping | None):
            raise ConfigError(f"Tuner(param_space) must be a dict, not {space!r}.")
        self._template = dict(space or {})
        self.grids: dict[Path, list[Any]] = {}
        self.domains: dict[Path, Domain] = {}
        self.functions: dict[Path, Function] = {}
        for path, node in _leaves(self._template, ()):
            if isinstance(node, Function):
                self.functions[path] = node
            elif isinstance(node, Domain):
                self.domains[path] = node
            elif _is_grid(node):
                self.grids[path] = _grid_values(node, path)

    @property
    def is_constant(self) -> bool:
        return not (self.grids or self.domains or self.functions)

    def grid_size(self, preset: Mapping[Path, Any]) -> int:
        """How many configurations the grids cross to, but for those that `preset` gives a value."""
        return math.prod(len(values) for path, values in self.grids.items() if path not in preset)

    def constants(self) -> dict[str, Any]:
        """The space without whatever is to be searched."""
        made = _without(self._template, {**self.grids, **self.domains, **self.functions}, ())
        assert isinstance(made, dict)
        return made

    def preset(self, point: Mapping[str, Any]) -> dict[Path, Any]:
        """The paths that a point of the user's gives values to. Nested keys may be written `a/b`."""
        found: dict[Path, Any] = {}
        self._find_presets(point, self._template, (), found)
        return found

    def resolve(
        self, rng: random.Random, grid_index: int = 0, preset: Mapping[Path, Any] | None = None
    ) -> dict[str, Any]:
        """One configuration. The first grid varies fastest."""
        values: dict[Path, Any] = dict(preset or {})
        for path, choices in self.grids.items():
            if path not in values:
                grid_index, at = divmod(grid_index, len(choices))
                values[path] = _resolve_nested(choices[at], rng, path)
        for path, domain in self.domains.items():
            if path not in values:
                values[path] = _resolve_nested(domain.draw(rng), rng, path)
        self._call_functions(values, rng)
        return self.with_values(values)

    def with_values(self, values: Mapping[Path, Any]) -> dict[str, Any]:
        """The space with these values at their paths."""
        made = _build(self._template, (), values)
        assert isinstance(made, dict)
        return made

    def _call_functions(self, values: dict[Path, Any], rng: random.Random) -> None:
        """Call each when what it looks at is there. One that looks at another's value is called after that."""
        waiting = {path: function for path, function in self.functions.items() if path not in values}
        while waiting:
            before = len(waiting)
            for path, function in list(waiting.items()):
                config = _build(self._template, (), values | dict.fromkeys(waiting, _UNRESOLVED))
                try:
                    value = function.call(_Resolved(config))
                except _NotResolved:
                    continue
                except BaseException as error:
                    if is_signal(error):
                        raise
                    raise ConfigError(f"param_space[{spell_path(path)!r}]: {function!r} raised {error!r}.") from error
                values[path] = _resolve_nested(value, rng, path)
                del waiting[path]
            if len(waiting) == before:
                names = ", ".join(map(spell_path, waiting))
                raise ConfigError(f"param_space: the functions of {names} need each other's values: break the circle.")

    def _find_presets(self, point: Mapping[str, Any], node: Any, path: Path, found: dict[Path, Any]) -> None:
        for key, value in point.items():
            here, child = path, node
            for part in _parts(child, key):
                part, child = _child(child, part, here)
                here += (part,)
            if isinstance(value, Mapping) and isinstance(child, Mapping) and not _is_grid(child):
                self._find_presets(value, child, here, found)
                continue
            domain = self.domains.get(here)
            if domain is not None and not domain.is_valid(value):
                warnings.warn(
                    f"points_to_evaluate: {spell_path(here)}={value!r} is outside of {domain!r}.", stacklevel=2
                )
            found[here] = value


def has_unresolved_values(space: Mapping[str, Any] | None) -> bool:
    """Whether something in the space is still to be searched."""
    return not Space(space).is_constant


def merge_configs(
    base: Mapping[str, Any], suggested: Mapping[str, Any], space: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A searcher's suggestion, whose nested keys may be written `a/b`, over the constants of the space. A key that is
    in the space as it is written is that one."""
    template = space or {}
    merged = {key: _copy(value) for key, value in base.items()}
    for key, value in suggested.items():
        where: Any = merged
        *parents, last = (key,) if key in template else _parts(where, key)
        for part in parents:
            where = where[int(part)] if isinstance(where, list) else where.setdefault(part, {})
        if isinstance(where, list):
            where[int(last)] = value
        elif isinstance(value, Mapping) and isinstance(where.get(last), Mapping):
            inner = template.get(key)
            where[last] = merge_configs(where[last], value, inner if isinstance(inner, Mapping) else None)
        else:
            where[last] = value
    return merged


def spell_path(path: Path) -> str:
    """`("a", "b", 0)` as `a/b/0`."""
    return "/".join(map(str, path))


# ------------------------------------------------------------------ walking


def _is_grid(node: Any) -> bool:
    return isinstance(node, Mapping) and len(node) == 1 and _GRID in node


def _grid_values(node: Mapping[str, Any], path: Path) -> list[Any]:
    values = grid_search(node[_GRID])[_GRID]
    if any(_is_grid(leaf) for value in values for _, leaf in _leaves(value, ())):
        raise ConfigError(f"param_space[{spell_path(path)!r}]: a grid_search inside of a grid_search: write one list.")
    return list(values)


def _leaves(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Everything that holds nothing further, grids included."""
    if isinstance(node, Mapping) and not _is_grid(node):
        for key, item in node.items():
            yield from _leaves(item, path + (key,))
    elif isinstance(node, list | tuple):
        for index, item in enumerate(node):
            yield from _leaves(item, path + (index,))
    else:
        yield path, node


def _build(node: Any, path: Path, values: Mapping[Path, Any]) -> Any:
    """A copy with the values at their paths. Objects of users are not copied, only what they lie in."""
    if path in values:
        return values[path]
    if isinstance(node, Mapping):
        return {key: _build(item, path + (key,), values) for key, item in node.items()}
    if isinstance(node, list | tuple) and not hasattr(node, "_fields"):
        return type(node)(_build(item, path + (index,), values) for index, item in enumerate(node))
    return node


def _without(node: Any, paths: Mapping[Path, Any], path: Path) -> Any:
    if isinstance(node, Mapping):
        kept = {key: _without(item, paths, path + (key,)) for key, item in node.items() if path + (key,) not in paths}
        return kept
    if isinstance(node, list | tuple) and not hasattr(node, "_fields"):
        # A list keeps its length, so that what is searched in it has its place.
        return type(node)(
            None if path + (index,) in paths else _without(item, paths, path + (index,))
            for index, item in enumerate(node)
        )
    return node


def _copy(node: Any) -> Any:
    return _build(node, (), {})


def _resolve_nested(value: Any, rng: random.Random, path: Path) -> Any:
    """Draw what a drawn value itself holds, such as the domains in one of a choice's dicts."""
    if not isinstance(value, Mapping | list | tuple | Domain):
        return value
    inner = Space({"value": value})
    if inner.grids:
        raise ConfigError(
            f"param_space[{spell_path(path)!r}]: a grid_search inside of a drawn value: a grid must stand on its own."
        )
    return value if inner.is_constant else inner.resolve(rng)["value"]


def _parts(node: Any, key: Any) -> Sequence[Any]:
    if not isinstance(key, str) or (isinstance(node, Mapping) and key in node):
        return (key,)
    return key.split("/")


def _child(node: Any, part: Any, path: Path) -> tuple[Any, Any]:
    """The key, a number in a list, and what it leads to."""
    try:
        if isinstance(node, list | tuple):
            return int(part), node[int(part)]
        if isinstance(node, Mapping) and not _is_grid(node):
            return part, node[part]
    except (KeyError, IndexError, ValueError):
        pass
    raise ConfigError(
        f"points_to_evaluate names {spell_path(path + (part,))!r}, which the param_space does not have: add it there."
    )


# ------------------------------------------------------------------ what functions see


class _NotResolved(Exception):
    """A function looked at a value that another function has still to give."""


_UNRESOLVED = object()


class _Resolved(dict[str, Any]):
    """The configuration so far, for `sample_from`: a dict whose keys are attributes too. Older scripts write
    spec.config.x for what is config["x"]."""

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        if value is _UNRESOLVED:
            raise _NotResolved
        return _Resolved(value) if type(value) is dict else value

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401  this is `get`

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name == "config":
            return self
        raise AttributeError(f"the configuration has no {name!r}; it has: {', '.join(map(str, self)) or 'nothing'}")
