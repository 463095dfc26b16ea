"""Hugging Face Transformers on several workers: an ordinary `transformers.Trainer`, with one callback more.

The model is a tiny GPT-2 with random weights and the text is made up, so that nothing is downloaded.

    python examples/frameworks/train_transformers.py --storage_path ~/holdfast_results --run_name transformers
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from holdfast import train
from holdfast.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
from holdfast.train.torch import TorchTrainer


class CountingText(torch.utils.data.Dataset):
    """Sequences that count upwards from different starts: easy to learn."""

    def __len__(self):
        return 128

    def __getitem__(self, index):
        tokens = (torch.arange(16) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


def train_func(config):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    arguments = TrainingArguments(
        output_dir="output",  # in the worker's own working directory
        num_train_epochs=config["epochs"],
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=CountingText(), callbacks=[RayTrainReportCallback()])
    trainer = prepare_trainer(trainer)
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        trainer.train()
    else:
        with checkpoint.as_directory() as directory:
            trainer.train(resume_from_checkpoint=Path(directory, RayTrainReportCallback.CHECKPOINT_NAME))
    return sum(parameter.abs().sum().item() for parameter in model.parameters())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage_path")
    parser.add_argument("--run_name", default="train_transformers")
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
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
