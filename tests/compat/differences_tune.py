"""Every deliberate difference between Holdfast's public names and Ray Tune's (2.60), with its reason.

`test_surface` holds the keys to what an installed Ray has, `page` makes docs/migrating-tune.md from them. What runs
trials (Tuner, run, trainables) is not there yet, and not compared.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["BEHAVIOUR", "MISSING", "MODULES", "OTHER_DEFAULTS", "OURS"]

MODULES: dict[str, tuple[str, ...]] = {
    "tune": (
        *("Callback", "ResultGrid", "Stopper", "choice", "create_scheduler", "create_searcher", "grid_search"),
        *("lograndint", "loguniform", "qlograndint", "qloguniform", "qrandint", "qrandn", "quniform", "randint"),
        *("randn", "sample_from", "uniform"),
    ),
    "tune.search": (),
    "tune.search.optuna": (),
    "tune.search.repeater": ("TRIAL_INDEX",),
    "tune.schedulers": (),
    "tune.stopper": (),
    "tune.logger": (),
    "tune.callback": ("Callback",),
}
"""What is compared; where Ray has no `__all__`, or more than is there yet, these names."""


def _each(classes: Iterable[str], attributes: Iterable[str], reason: str) -> dict[str, str]:
    return {f"tune.{kind}.{attribute}": reason for kind in classes for attribute in attributes}


_SCHEDULERS = (
    *("ASHAScheduler", "AsyncHyperBandScheduler", "FIFOScheduler", "HyperBandScheduler", "MedianStoppingRule"),
    *("PopulationBasedTraining", "TrialScheduler"),
)
_SEARCHERS = ("search.Searcher", "search.ConcurrencyLimiter", "search.Repeater", "search.optuna.OptunaSearch")
_JOURNAL = (
    "the journal has what happened, and it is repeated to a searcher that is made again; there are no state files"
)

MISSING = {
    **_each(_SEARCHERS, ("CKPT_FILE_TMPL", "save_to_dir", "restore_from_dir"), _JOURNAL),
    **_each(
        ["search.BasicVariantGenerator"],
        ("CKPT_FILE_TMPL", "has_checkpoint", "save_to_dir", "restore_from_dir"),
        _JOURNAL,
    ),
    **_each(_SEARCHERS, ("add_evaluated_trials",), "`add_evaluated_point` takes one at a time"),
    **_each(
        ["search.BasicVariantGenerator"],
        ("add_configurations", "is_finished", "next_trial", "set_finished"),
        "it is a `Searcher` like any other: `suggest`",
    ),
    "tune.search.SearchAlgorithm": "there is one kind of searcher: `Searcher`",
    "tune.search.SearchGenerator": "there is one kind of searcher: `Searcher`",
    **_each(
        ["search"],
        ("UNDEFINED_METRIC_MODE", "UNDEFINED_SEARCH_SPACE", "UNRESOLVED_SEARCH_SPACE"),
        "texts of Ray's errors",
    ),
    "tune.search.optuna.OptunaSearch.convert_search_space": "spaces are asked for parameter by parameter",
    **_each(
        [f"schedulers.{name}" for name in _SCHEDULERS],
        ("supports_buffered_results",),
        "every result is decided on as it comes",
    ),
    "tune.schedulers.HyperBandForBOHB": "needs a searcher that is not here; `HyperBandScheduler` goes with any",
    "tune.schedulers.PopulationBasedTraining.last_scores": "internal to Ray",
    "tune.schedulers.PopulationBasedTraining.reset_stats": "internal to Ray",
    "tune.schedulers.PopulationBasedTrainingReplay": "not there yet",
    "tune.schedulers.ResourceChangingScheduler": "a trial's resources are fixed",
    "tune.logger.JsonLoggerCallback.update_config": "params.json is written in any case",
    "tune.logger.TBXLoggerCallback.VALID_HPARAMS": "internal to Ray",
    "tune.logger.TBXLoggerCallback.VALID_NP_HPARAMS": "internal to Ray",
    "tune.logger.pretty_print": "use `json.dumps` or `pprint`",
    "tune.ResultGrid(experiment_analysis)": "made by Holdfast, not by scripts",
}
"""What Ray has and Holdfast does not."""

OTHER_DEFAULTS = {
    f"tune.{name}(base)": "has no effect in either"
    for name in ("lograndint", "loguniform", "qlograndint", "qloguniform")
}
"""Parameters whose default is another than Ray's."""

OURS = {
    **{
        f"tune.ResultGrid({name})": "made by Holdfast, not by scripts"
        for name in ("experiment_path", "filesystem", "metric", "mode", "open_result", "read_history", "trials")
    },
    "tune.schedulers.create_scheduler": "as `tune.create_scheduler`",
    "tune.search.create_searcher": "as `tune.create_searcher`",
    "tune.stopper.DictStopper": "what `RunConfig(stop={...})` becomes",
}
"""What Holdfast has and Ray does not."""

BEHAVIOUR = (
    (
        "Random values",
        "drawn one after the other from numpy's generator",
        "each depends on the seed and the trial's number alone, so a trial that is added or repeated changes no other; "
        "other values than Ray's for the same seed",
    ),
    (
        "What a restart needs",
        "searcher, scheduler and space are pickled",
        "they are stored as names and JSON arguments and told again what happened; a lambda, an object, or a function "
        "of the main script is asked for",
    ),
    ("Not-a-number as a metric", "`ASHAScheduler` lets the trial go on", "ranks worst everywhere"),
    (
        "`PopulationBasedTraining`: bounds",
        "a mutated value may leave its domain",
        "a mutated value stays within its domain",
    ),
    (
        "`PopulationBasedTraining`: `tune.choice`",
        "treated as a number; an error for strings",
        "gives way to a neighbour, as an entry of a list does",
    ),
    (
        "`PopulationBasedTraining`: a donor's checkpoint",
        "may have been deleted by `num_to_keep`",
        "pinned from when its trial was judged",
    ),
    (
        "`MedianStoppingRule(min_time_slice=0)`",
        "pauses trials at each report for those that wait, until there is enough to compare",
        "pauses none; give a time slice to have trials take turns",
    ),
    (
        "`HyperBandScheduler`: the first bracket",
        "the one whose trials run to `max_t`",
        "the one with the most trials and the first milestone, as in the paper",
    ),
    (
        "`OptunaSearch` and `tune.randn`, `qrandn`, `qloguniform`, `qlograndint`, `sample_from`",
        "refused, or not quantized",
        "searched as they are; domains inside of a choice's values as well",
    ),
    (
        "`OptunaSearch(seed)` with a `sampler`",
        "has no effect",
        "seeds the sampler; the experiment's seed does if there is none",
    ),
    ("`OptunaSearch(storage)`", "keeps the trials there", "has no effect: the experiment's journal keeps them"),
    ("`RunConfig(stop=[...])`", "a list of stoppers", "a list of stoppers, dicts and functions"),
    (
        "`MaximumIterationStopper` after a trial's failure",
        "counts repeated reports again",
        "compares `training_iteration`",
    ),
    (
        "`JsonLoggerCallback`, `CSVLoggerCallback`, `TBXLoggerCallback`",
        "write the files",
        "accepted; the files are written in any case",
    ),
)
"""What the names do not show: (what, Ray, Holdfast)."""
