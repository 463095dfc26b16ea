"""Lightning with `RayFSDPStrategy` on CPUs. torch wants an accelerator for FSDP unless the device is given, which
Lightning does not do for a CPU: so the model wraps itself, in `configure_model`."""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from holdfast import train
from holdfast.train.lightning import RayFSDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from holdfast.train.torch import TorchTrainer


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def configure_model(self):
        if not isinstance(self.net, FullyShardedDataParallel):
            self.net = FullyShardedDataParallel(self.net, device_id=torch.device("cpu"), use_orig_params=True)

    def training_step(self, batch, batch_index):
        inputs, wanted = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), wanted)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train_func(config):
    pl.seed_everything(0)
    inputs = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        accelerator="cpu",
        strategy=RayFSDPStrategy(state_dict_type="sharded"),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    model = Regression()
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        trainer.fit(model, loader)
    else:
        with checkpoint.as_directory() as directory:
            trainer.fit(model, loader, ckpt_path=Path(directory, RayTrainReportCallback.CHECKPOINT_NAME))
    return sum(parameter.abs().sum().item() for parameter in model.parameters())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage_path")
    parser.add_argument("--run_name")
    args = parser.parse_args()
    TorchTrainer(
        train_func,
        train_loop_config={"epochs": 4},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            name=args.run_name,
            storage_path=args.storage_path,
            failure_config=train.FailureConfig(max_failures=3),
        ),
    ).fit()


if __name__ == "__main__":
    main()
