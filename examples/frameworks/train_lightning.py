"""PyTorch Lightning on several workers: the model and the `Trainer` are ordinary ones, with the run's strategy.

python examples/frameworks/train_lightning.py --storage_path ~/holdfast_results --run_name lightning
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from holdfast import train
from holdfast.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from holdfast.train.torch import TorchTrainer


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, batch, batch_index):
        inputs, wanted = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), wanted)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train_func(config):
    pl.seed_everything(0)
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    model = Regression()
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        accelerator="cpu",
        devices="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        trainer.fit(model, loader)
    else:
        with checkpoint.as_directory() as directory:
            path = Path(directory, RayTrainReportCallback.CHECKPOINT_NAME)
            trainer.fit(model, loader, ckpt_path=path)
    return sum(parameter.abs().sum().item() for parameter in model.parameters())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage_path")
    parser.add_argument("--run_name", default="train_lightning")
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    result = TorchTrainer(
        train_func,
        train_loop_config={"epochs": args.epochs},
        scaling_config=train.ScalingConfig(num_workers=args.num_workers),
        run_config=train.RunConfig(
            name=args.run_name,
            storage_path=args.storage_path,
            failure_config=train.FailureConfig(max_failures=3),
        ),
    ).fit()
    print("loss", result.metrics["loss"])


if __name__ == "__main__":
    main()
