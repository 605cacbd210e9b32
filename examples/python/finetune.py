"""Fine-tunes a Qwen3.5 in bf16: protected tensors keep their f32 bits from checkpoint to checkpoint.

python finetune.py MODEL RESULT                                 # transformers' Trainer
torchrun --nproc-per-node 2 finetune.py MODEL RESULT            # FSDP2
"""

import os
import sys

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from ballast.torch import Ledger, fully_shard, keep_fp32, loading, save_pretrained

source, result = sys.argv[1:]
texts = [{"input_ids": ids, "labels": ids} for ids in torch.arange(256).reshape(16, 16) % 150]  # your data

with loading("strict"):
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
keep_fp32(model, "strict")

if "RANK" not in os.environ:
    run = TrainingArguments(f"{result}-run", bf16=True, use_cpu=not torch.cuda.is_available(), max_steps=3)
    Trainer(model, run, train_dataset=texts, callbacks=[Ledger(f"{result}-run")]).train()
else:
    torch.distributed.init_process_group()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer, ledger = torch.optim.AdamW(model.parameters(), lr=1e-4), Ledger(f"{result}-run")
    ledger.attach(model.train())
    for text in texts[torch.distributed.get_rank() :: torch.distributed.get_world_size()][:3]:
        model(**{key: ids[None] for key, ids in text.items()}).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ledger.step(model)
        optimizer.step()
        optimizer.zero_grad()
    ledger.close()

save_pretrained(model, result, "strict")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()  # without it, a rank may abort while it ends
