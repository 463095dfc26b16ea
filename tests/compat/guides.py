"""What became of the Python blocks of Ray Train's guides when they were run with `ray` replaced by `holdfast`.

Run by hand on a machine without GPUs and without the internet. `page` makes a table of it in docs/migrating.md.
"""

from __future__ import annotations

__all__ = ["GUIDES"]

_IMAGES = "generated images and a small model in place of FashionMNIST and resnet18"
_RAY_DATA = "needs Ray Data"

GUIDES = (
    ("overview", "ran", ""),
    ("getting-started-pytorch", "ran", _IMAGES),
    ("getting-started-pytorch-lightning", "ran", _IMAGES),
    ("getting-started-transformers", "ran", "generated rows and a tiny BERT in place of downloads"),
    ("getting-started-xgboost", "ran", "data frames in place of Ray Data"),
    ("getting-started-lightgbm", "ran", "data frames in place of Ray Data"),
    ("getting-started-jax", "ran", "CPUs in place of TPUs; plain gradient descent in place of optax"),
    ("huggingface-accelerate", "ran in part", "without the DeepSpeed and FSDP plugins, which need GPUs"),
    ("deepspeed", "not run", "needs GPUs"),
    ("distributed-tensorflow-keras", "fails", "there is no TensorflowTrainer here"),
    ("horovod", "fails", "there is no HorovodTrainer here; Ray Train refuses it as well"),
    (
        "user-guides/checkpoints",
        "ran",
        "files in place of S3; the custom Lightning callback hangs: it saves on rank 1 what all ranks must save",
    ),
    ("user-guides/fault-tolerance", "ran", "`get_preemption_info()` is no barrier"),
    ("user-guides/monitoring-logging", "ran", ""),
    ("user-guides/results", "ran", ""),
    ("user-guides/persistent-storage", "ran", "local, pyarrow and fsspec filesystems in place of clouds"),
    ("user-guides/local-mode", "ran", f"under torchrun with 2 processes; {_IMAGES}"),
    ("user-guides/reproducibility", "ran", ""),
    ("user-guides/using-accelerators", "ran in part", "what needs no GPU; TPUs are refused with a sentence"),
    ("user-guides/data-loading-preprocessing", "ran in part", "lists in place of Ray Data; the rest needs Ray Data"),
    (
        "user-guides/experiment-tracking",
        "ran in part",
        "`runtime_env` variables reach workers; the rest needs accounts",
    ),
    ("user-guides/elastic-training", "ran", "`use_gpu=True` left out; the blocks were written from memory"),
    (
        "user-guides/asynchronous-validation",
        "ran in part",
        "CPUs in place of GPUs, tensors in place of Ray Data; `map_batches` needs Ray Data",
    ),
    ("user-guides/hyperparameter-optimization", "ran", "the blocks were written from memory"),
    ("user-guides/scaling-collation-functions", "not run", _RAY_DATA),
    ("examples: torch_quick_start, torch_fashion_mnist_example", "ran", _IMAGES),
    ("examples: torch_linear_example", "ran", ""),
    ("examples: torch_regression_example", "not run", _RAY_DATA),
    ("examples: language and image models", "not run", "need GPUs and downloads"),
)
"""(page or example, what happened, what was replaced or why not)."""
