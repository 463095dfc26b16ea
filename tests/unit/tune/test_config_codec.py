"""Configurations in the journal: what JSON cannot hold is found again in the space, and only there."""

from __future__ import annotations

import json
import math
from typing import Any

from holdfast import tune
from holdfast.train import ScalingConfig
from holdfast.tune.config_codec import ConfigCodec, ConfigTexts, find_unstored
from holdfast.tune.search.variant_generator import Space
from holdfast.tune.serialization import Unstored


class Thing:
    pass


def codec(space: dict[str, Any]) -> ConfigCodec:
    return ConfigCodec(space, Space(space).constants())


def through_json(stored: Any) -> Any:
    return json.loads(json.dumps(stored, allow_nan=False))


def test_values_that_json_cannot_hold_are_those_of_the_space() -> None:
    one, two, three = Thing(), Thing(), Thing()
    inner, small, large = {"inner": lambda x: 3 * x}, ScalingConfig(num_workers=1), ScalingConfig(num_workers=2)
    space = {
        "constant": (one, 1),
        "grid": tune.grid_search([one, two]),
        "choice": tune.choice([lambda x: 2 * x, inner]),
        "sizes": tune.choice([small, large]),
        "deep": {"list": [tune.choice([three])]},
    }
    config = {
        "constant": (one, 1),
        "grid": two,
        "choice": inner,
        "sizes": large,
        "deep": {"list": [three]},
    }
    stored = through_json(codec(space).encode(config))
    found = codec(space).decode(stored)
    assert found == config
    assert found["grid"] is two and found["choice"]["inner"] is inner["inner"] and found["sizes"] is large
    assert find_unstored(found) is None


def test_a_value_from_elsewhere_stays_a_description() -> None:
    """Also when it is stored again, as that of a clone is."""
    space = {"made": tune.sample_from(Thing), "known": Thing()}
    config = {"made": [Thing()], "known": space["known"]}
    for _ in range(2):
        config = codec(space).decode(through_json(codec(space).encode(config)))
        assert config["known"] is space["known"]
        assert config["made"] == [Unstored(f"an object of {__name__}.Thing")]
        assert find_unstored(config) == config["made"][0]


def test_constants_that_look_like_secrets_are_not_written() -> None:
    space = {"password": "hunter2", "x": tune.uniform(0, 1), "list": [{"api_key": "abc"}, 1]}
    config = {**space, "x": 0.5}
    stored = through_json(codec(space).encode(config))
    assert "hunter2" not in str(stored) and "abc" not in str(stored)
    assert codec(space).decode(stored) == config
    assert codec({**space, "password": "other"}).decode(stored)["password"] == "other"


def test_secrets_are_not_written_wherever_they_stand() -> None:
    """Beside what is searched, or cannot be stored; in tuples; in the middle of a text; as an object."""
    space: dict[str, Any] = {
        "beside": ["sk-0123456789abcdefhunter", tune.uniform(0, 1), Thing()],
        "api_keys": ("1hunter", tune.choice([1])),
        "password": Thing(),
        "tokens": {"api_key": ("2hunter", "3hunter"), "secret": {1: "4hunter"}},
        "url": "postgres://me:5hunter@host/data",
    }
    config = {**space, "beside": [space["beside"][0], 0.5, space["beside"][2]], "api_keys": ("1hunter", 1)}
    stored = through_json(codec(space).encode(config))
    assert "hunter" not in str(stored)
    assert codec(space).decode(stored) == config


def test_functions_of_python_itself_are_those_of_the_space() -> None:
    space = {"function": tune.choice([math.sqrt, abs]), "type": int, "path": {"a\udcff": "a\udcff"}}
    config = {**space, "function": abs}
    stored = through_json(codec(space).encode(config))
    assert codec(space).decode(stored) == config


def test_who_knows_no_space_reads_texts() -> None:
    space = {"thing": Thing(), "password": "hunter2", "function": find_unstored}
    stored = through_json(codec(space).encode({**space, "x": 1}))
    stored["gone"] = {"$tune": "function", "name": "no_such_module:f"}
    stored["stopper"] = {"$tune": "component", "name": "no_such_module:Stopper", "items": [], "keywords": {}}
    assert ConfigTexts().decode(stored) == {
        "thing": f"an object of {__name__}.Thing",
        "password": "a secret",
        "function": find_unstored,
        "gone": "no_such_module:f",
        "stopper": "no_such_module:Stopper",
        "x": 1,
    }
