"""TRL scores left-padded prompts without `position_ids`, so that GPT-2 scores other positions than it has sampled."""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


THREAD = "https://github.com/huggingface/trl/issues/6800"
MECHANISMS = ("safe_trainers/rollout/scoring_inputs.py", "safe_trainers/model/sequence_trial.py")
QUESTION = "largest difference in nats of a token's score with and without padding before its prompt, in float32"

words = {f"w{i}": i for i in range(64)}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="w1", pad_token="w0"
)
torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1, pad_token_id=0)
with tempfile.TemporaryDirectory() as folder:
    args = GRPOConfig(folder, use_cpu=True, bf16=False, report_to=[], per_device_train_batch_size=2, num_generations=2)
    trainer = GRPOTrainer(
        GPT2LMHeadModel(config).eval(),
        reward_funcs=lambda completion_ids, **kwargs: [0.0 for _ in completion_ids],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "w5 w6"}] * 4),
        processing_class=tokenizer,
    )
tokens = [5, 6, 7, 8, 9, 10]
ids = torch.tensor([[0, 0, 0, *tokens], [*tokens, 0, 0, 0]])
padding = torch.tensor([[0, 0, 0] + [1] * 6, [1] * 6 + [0, 0, 0]])
with torch.no_grad():
    padded = trainer._get_per_token_logps_and_entropies(trainer.model, ids[:1], padding[:1], 3)[0]
    alone = trainer._get_per_token_logps_and_entropies(trainer.model, ids[1:, :6], padding[1:, :6], 3)[0]
difference = (padded - alone).abs().max().item()
print("FAULT" if difference > 1e-4 else "FIXED", f"{difference:.2f}")
