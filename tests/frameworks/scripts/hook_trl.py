"""TRL's GRPOTrainer (DDP) with a rollout function, and ``reloadpg.offloaded`` around it."""

import hook_results as results
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ("<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz")


def main():
    transformers.set_seed(7)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **tokens, **results.SIZES))
    rollout_func = rollout
    if results.HOOK:
        import reloadpg

        def rollout_func(prompts, trainer):
            with reloadpg.offloaded():
                return rollout(prompts, trainer)

    prompts = [" ".join(WORDS[2 + (i + j) % 26] for j in range(4)) for i in range(32)]
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=reward,
        args=trl.GRPOConfig(
            output_dir=str(results.FOLDER / "out"),
            use_cpu=True,
            bf16=False,
            max_steps=results.STEPS,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=6,
            learning_rate=0.01,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        rollout_func=rollout_func,
    )
    trainer.train()
    names = ("loss", "reward", "grad_norm", "entropy")
    losses = [entry[name] for entry in trainer.state.log_history for name in names if name in entry]
    results.leave("trl", trl.__version__, losses, model.parameters())


def rollout(prompts, trainer):
    """An engine of the rank's own: samples from its copy of the weights."""
    if results.HOOK:
        results.phase()
    model = trainer.accelerator.unwrap_model(trainer.model)
    found = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for prompt in prompts:
        ids = trainer.processing_class(prompt)["input_ids"]
        with torch.no_grad():
            out = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=6,
                do_sample=True,
            )
            completion = out[0, len(ids) :].tolist()
            logits = model(out).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        chosen = logits.gather(1, out[0, len(ids) :, None])[:, 0].tolist()
        found["prompt_ids"].append(ids)
        found["completion_ids"].append(completion)
        found["logprobs"].append(chosen)
    return found


def reward(completions, **_):
    return [float(completion.count("a") + len(completion) % 3) for completion in completions]


if __name__ == "__main__":
    main()
