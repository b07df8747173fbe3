"""transformers' Trainer (DDP), and the callback of ``reloadpg.integrations.transformers``."""

import hook_results as results
import torch
import transformers
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def main():
    transformers.set_seed(7)
    config = LlamaConfig(vocab_size=32, attention_dropout=0.1, **results.SIZES)
    model = LlamaForCausalLM(config)
    data = TensorDataset(torch.randint(32, (64, 12)))
    callbacks = []
    if results.HOOK:
        from reloadpg.integrations.transformers import offloaded_phase

        callbacks = [offloaded_phase(results.phase, when="step_end", every=results.EVERY)]
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(results.FOLDER / "out"),
            use_cpu=True,
            max_steps=results.STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=data,
        eval_dataset=data,
        data_collator=collate,
        callbacks=callbacks,
    )
    trainer.train()
    losses = [
        entry[name]
        for entry in trainer.state.log_history
        for name in ("loss", "eval_loss", "grad_norm")
        if name in entry
    ]
    results.leave("transformers", transformers.__version__, losses, model.parameters())


def collate(rows):
    ids = torch.stack([row[0] for row in rows])
    return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    main()
