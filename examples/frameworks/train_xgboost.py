"""XGBoost on several workers, each with its share of the rows; a restarted run goes on from the last saved model.

python examples/frameworks/train_xgboost.py --storage_path ~/holdfast_results --run_name xgboost
"""

import argparse

import numpy as np
import xgboost

from holdfast import train
from holdfast.train.xgboost import RayTrainReportCallback, XGBoostTrainer


def train_func(config):
    context = train.get_context()
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2000, 8))
    labels = rows[:, 0] * rows[:, 1] + np.sin(rows[:, 2])
    mine = slice(context.get_world_rank(), None, context.get_world_size())
    data = xgboost.DMatrix(rows[mine], label=labels[mine])

    booster, rounds = None, config["rounds"]
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        booster = RayTrainReportCallback.get_model(checkpoint)
        rounds -= booster.num_boosted_rounds()
    booster = xgboost.train(
        {"objective": "reg:squarederror", "max_depth": 4, "eta": 0.3, "tree_method": "hist", "nthread": 1},
        data,
        num_boost_round=rounds,
        evals=[(data, "train")],
        xgb_model=booster,
        verbose_eval=False,
        callbacks=[RayTrainReportCallback({"rmse": "train-rmse"}, frequency=2)],
    )
    return float(booster.predict(data).sum())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage_path")
    parser.add_argument("--run_name", default="train_xgboost")
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    result = XGBoostTrainer(
        train_func,
        train_loop_config={"rounds": args.rounds},
        scaling_config=train.ScalingConfig(num_workers=args.num_workers),
        run_config=train.RunConfig(
            name=args.run_name,
            storage_path=args.storage_path,
            failure_config=train.FailureConfig(max_failures=3),
        ),
    ).fit()
    print("rmse", result.metrics["rmse"])


if __name__ == "__main__":
    main()
