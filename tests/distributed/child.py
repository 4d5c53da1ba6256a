"""One process of a run, started by processes.py: trains what parts.json says, and writes what it has found."""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import accelerate.state
import torch
import transformers.training_args
from accelerate.utils import DistributedType
from transformers import BitsAndBytesConfig, TrainerCallback


ENGINE = ""


def gloo_for_fsdp() -> None:
    """FSDP2 over gloo: accelerate shards on machines with accelerators only. For tests alone."""

    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        return "gloo", DistributedType.MULTI_GPU

    accelerate.state.PartialState._prepare_backend = prepare_backend


class Pinned:
    """Below the safe classes and above TRL's: completions that follow from the prompt, alike however many processes
    share them out. What is random in a rollout cannot be compared."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        seen: dict[tuple[int, ...], int] = {}
        completions = []
        for ids in prompt_ids:
            turn = seen[tuple(ids)] = seen.get(tuple(ids), -1) + 1
            generator = torch.Generator().manual_seed(sum(ids) * 31 + turn)
            completions.append(torch.randint(20, 120, (6,), generator=generator).tolist())
        return completions, None


def trainer_class(task: str, safe: bool, pinned: bool) -> type:
    import cells

    from safe_trainers import PrecisionBase, PrecisionMixin

    stock = cells.STOCK[task]
    if not pinned:
        return cells.SAFE[task] if safe else stock
    base = type(stock.__name__, (Pinned, stock), {})
    if not safe:
        return base
    made = type(f"Safe{stock.__name__}", (PrecisionMixin, base, PrecisionBase), {})
    made.config_class = cells.SAFE_CONFIG[task]
    return made


def told_apart(row: dict[str, Any], index: int) -> dict[str, Any]:
    """Prompts of one length, so that each process pads as a single one does: bf16 rounds by the shape of a batch."""
    words = ["red" if index & 1 << bit else "blue" for bit in range(4)]
    return {"prompt": [{**row["prompt"][0], "content": " ".join([row["prompt"][0]["content"], *words])}]}


def resized(row: dict[str, Any], index: int) -> dict[str, Any]:
    return {"image": row["image"].resize((32 * (1 + index % 3), 32 * (1 + index % 2)))}


def poison(trainer: Any) -> None:
    """Makes the loss of the first step infinite, in this process alone."""
    compute = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = compute(*args, **kwargs)
        return loss * float("inf") if trainer.state.global_step == 0 else loss

    trainer.compute_loss = compute_loss


def die(trainer: Any, step: int) -> None:
    """Kills this process in a step, while others wait for its gradients."""
    compute = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = compute(*args, **kwargs)
        if trainer.state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    trainer.compute_loss = compute_loss


def inputs_of(trainer: Any) -> dict[str, list[str]]:
    """The dtypes of the floating tensors that losses are computed from, filled while it trains."""
    compute, found = trainer._compute_loss, {}

    def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                found[name] = sorted({*found.get(name, ()), str(value.dtype)})
        return compute(model, inputs, *args, **kwargs)

    trainer._compute_loss = compute_loss
    return found


def run(
    family: str = "text",
    task: str = "sft",
    weights: str = "fp32",
    flag: str | None = None,
    lora: bool = False,
    safe: bool = True,
    steps: int = 3,
    batch: int = 4,
    pinned: bool = False,
    folder: str | None = None,
    by_rank: list[dict[str, Any]] | None = None,
    wrap: str | None = None,
    ragged: bool = False,
    infinite: int | None = None,
    resume: str | bool | None = None,
    killed_in: int | None = None,
    fails: bool = False,
    packed: str | None = None,
    after: bool = False,
    watch_inputs: bool = False,
    refused: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """Trains, and says what came of it.

    Args:
        family: Which tiny model.
        task: `"sft"`, `"grpo"`, ...
        weights: What the model is loaded in.
        flag: `"bf16"`, `"fp16"` or none.
        lora: Whether adapters are trained.
        safe: Whether the trainer is this package's.
        steps: Optimizer steps.
        batch: Rows of all processes together.
        pinned: Whether completions follow from their prompts.
        folder: The output folder; by default one that is removed.
        by_rank: Training arguments of each process.
        wrap: The layers that FSDP shards one by one, by their class.
        ragged: Whether pictures have sizes of their own.
        infinite: The process whose loss is infinite in the first step.
        resume: The checkpoint to go on from; `True` for the newest complete one in `folder`.
        killed_in: The step, counted from 0, in which the last process is killed, between forward and backward pass.
        fails: Whether training stops with an error, in all processes alike; what it says is what came of it.
        after: Whether to evaluate after training, and to save the model in bfloat16.
        packed: The dtype that 4-bit weights are stored in; by default nothing is quantised.
        watch_inputs: Whether to note the dtypes of what a loss is computed from.
        refused: Whether the trainer cannot be built; what it says is what came of it.
        **changes: More training arguments.
    """
    import cells
    from policing import reset_accelerate

    from safe_trainers import PrecisionError
    from safe_trainers.checkpoint.integrity import safetensors_dtypes
    from safe_trainers.testing import fp16_on_cpu

    reset_accelerate()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    os.environ.pop("FSDP_TRANSFORMER_CLS_TO_WRAP", None)
    if wrap is not None:
        os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = wrap
    cell = cells.Cell(family, task, weights, flag, lora=lora)
    with tempfile.TemporaryDirectory() as scratch:
        made = cells.arguments(
            cell,
            (cells.SAFE_CONFIG if safe else cells.PLAIN)[task],
            steps,
            **{
                "use_cpu": ENGINE in ("alone", "ddp"),
                "per_device_train_batch_size": batch // world,
                "output_dir": folder or scratch,
                "ddp_backend": None if ENGINE == "alone" else "gloo",
                **changes,
                **(by_rank[rank] if by_rank else {}),
            },
        )
        if pinned:  # all prompts of the task are alike, and completions are to follow from them
            made["train_dataset"] = made["train_dataset"].map(told_apart, with_indices=True)
        if ragged:
            made["train_dataset"] = made["train_dataset"].map(resized, with_indices=True)
        if packed is not None:
            made["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=getattr(torch, packed)
            )
        made_of = trainer_class(task, safe, pinned)
        if flag == "fp16" and not ENGINE.startswith("zero"):  # DeepSpeed scales by itself
            made_of = fp16_on_cpu(made_of)
        if refused:
            try:
                made_of(**made)
            except PrecisionError as error:
                return {"refused": str(error)}
            raise AssertionError("it was built")
        trainer = made_of(**made)
        watch = Watch(trainer)
        trainer.add_callback(watch)
        if infinite == rank:
            poison(trainer)
        if killed_in is not None and rank == world - 1:
            die(trainer, killed_in)
        if watch_inputs:
            watch.found["inputs"] = inputs_of(trainer)
        try:
            trainer.train(resume_from_checkpoint=resume)
        except RuntimeError as error:
            if fails:
                cells.reset_autocast()
                return {"error": str(error)}
            raise
        if watch_inputs:
            names = ("advantages", "old_per_token_logps", "second_per_grid_ts")
            prepared = trainer._prepare_input({name: torch.ones(2, 3) for name in names})
            watch.found["prepared"] = {name: str(value.dtype) for name, value in prepared.items()}
        if after:
            watch.found["eval_loss"] = trainer.evaluate(trainer.train_dataset)["eval_loss"]
            trainer.args.save_dtype = "bfloat16"
            trainer.save_model(f"{scratch}/final")
            if rank == 0:
                files = Path(f"{scratch}/final").glob("*.safetensors")
                watch.found["saved"] = {
                    name: dtype for file in files for name, dtype in safetensors_dtypes(file).items()
                }
        report = trainer.precision.report.to_dict() if safe else None
        return {**facts(trainer), **watch.found, "logs": trainer.state.log_history, "report": report}


class Watch(TrainerCallback):
    """What a trainer scores tokens with, and what it held before its first step."""

    def __init__(self, trainer: Any) -> None:
        self.found: dict[str, Any] = {"logps": [], "logps_dtype": []}
        score = getattr(trainer, "_get_per_token_logps_and_entropies", None)
        if score is not None:

            def scored(*args: Any, **kwargs: Any) -> Any:
                result = score(*args, **kwargs)
                _, ids, mask, kept = args[:4]
                rows = {
                    " ".join(map(str, row[real].tolist())): logps[real[-kept:]].tolist()
                    for row, real, logps in zip(ids, mask.bool(), result[0].detach().float(), strict=True)
                }
                self.found["logps"].append(rows)
                self.found["logps_dtype"].append(str(result[0].dtype))
                return result

            trainer._get_per_token_logps_and_entropies = scored


def deepspeed_config() -> dict[str, Any]:
    """ZeRO with every parameter in parts; by default the small ones stay whole, which here are all."""
    sharded = {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    return {
        "zero_optimization": {"stage": int(ENGINE[-1]), **(sharded if ENGINE == "zero3" else {})},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }


def facts(trainer: Any) -> dict[str, Any]:
    """What a trained trainer is: processes, engine, shards, dtypes, and sums of its parameters."""
    from torch.distributed.tensor import DTensor

    accelerator = trainer.accelerator
    parameters = dict(trainer.model.named_parameters())
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "world": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        "processes": accelerator.num_processes,
        "type": accelerator.distributed_type.value,
        "dtensors": sum(isinstance(p, DTensor) for p in parameters.values()),
        "parameters": len(parameters),
        "local": sum(map(held_here, parameters.values())),
        "elements": sum(getattr(p, "ds_numel", p.numel()) for p in parameters.values()),
        "dtypes": sorted({str(p.dtype) for p in parameters.values()}),
        "trained_dtypes": sorted({str(p.dtype) for p in parameters.values() if p.requires_grad}),
        "losses": [entry["loss"] for entry in log],
        "grad_norms": [entry["grad_norm"] for entry in log],
        "sums": sums(trainer, parameters),
    }


def held_here(parameter: Any) -> int:
    """How many numbers of a parameter this process holds."""
    if hasattr(parameter, "ds_tensor"):
        return int(parameter.ds_tensor.numel()) if parameter.numel() == 0 else int(parameter.numel())
    return int((parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel())


def sums(trainer: Any, parameters: dict[str, Any]) -> dict[str, float]:
    """The sum of each trained parameter's magnitudes, gathered where it is sharded, in float64."""
    found = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        name = name.removeprefix("module.")
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().double().abs().sum().item()
            continue
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name] = whole.detach().double().abs().sum().item()
    return found


def main(folder: Path) -> None:
    global ENGINE
    told = json.loads((folder / "parts.json").read_text())
    ENGINE = told["engine"]
    if ENGINE.startswith("fsdp"):
        gloo_for_fsdp()
    if ENGINE.startswith(("fsdp", "zero")):
        # Without `use_cpu`, with which accelerate shards nothing, transformers asks a GPU whether it computes bf16.
        transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    if ENGINE.startswith("zero"):
        config = folder / f"deepspeed-{os.environ['RANK']}.json"
        config.write_text(json.dumps(deepspeed_config()))
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(config)
    import cells

    for family in {keywords.get("family", "text") for keywords in told["parts"].values()}:
        # Each process for itself: once they are a group, only the first of them would save, and under ZeRO-3 a model
        # is in parts from its first layer on.
        cells.why_not_built(family)
        cells.folder(family)
    torch.manual_seed(0)
    results = {name: run(**keywords) for name, keywords in told["parts"].items()}
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # before the interpreter ends: `two_processes.ENDING` says why


if __name__ == "__main__":
    main(Path(sys.argv[1]))
