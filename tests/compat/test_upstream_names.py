"""The contract with upstream: each name of TRL, transformers, PEFT, accelerate, bitsandbytes and torch that the
package relies on, and what for. A release that loses one is told here, by that name, before anything else fails.

Imports and overridden methods are read from the package itself, so that neither list grows old; what is read or called
otherwise is in `RELIED`.
"""

import ast
import dis
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import trl

import safe_trainers
from safe_trainers.core.patches import PATCHES
from safe_trainers.core.trl import BUFFER_METHOD, ROLLOUT_METHOD, VLLM_MODULE, trl_bases
from safe_trainers.trainer.base import PrecisionBase
from safe_trainers.trainer.mixin import PrecisionMixin


(MAKER,), (FUSER,), (ENGINE,) = (PATCHES[patch].names for patch in ("peft-maker", "fused-head", "vllm-engine"))


PACKAGE = Path(safe_trainers.__file__).parent
UPSTREAM = ("trl", "transformers", "peft", "accelerate", "bitsandbytes")
GENERATING = [trl.GRPOTrainer, trl.RLOOTrainer]
ALL = [*GENERATING, trl.SFTTrainer, trl.RewardTrainer]

RELIED = {
    # -- transformers
    "transformers:Trainer._prepare_input": "media are cast in it, also where TRL calls past every other class",
    "transformers:Trainer._prepare_inputs": "each batch passes through it",
    "transformers:Trainer.create_accelerator_and_postprocess": "the loss scaler is configured after it",
    "transformers:Trainer._get_output_dir": "where a checkpoint goes",
    "transformers:Trainer.add_callback": "reports, skips and the beginning of an epoch",
    "transformers:Trainer.is_world_process_zero": "who writes the report",
    "transformers:Trainer()accelerator": "mixed precision as it was really built",
    "transformers:Trainer()callback_handler": "which callbacks are there already",
    "transformers:Trainer()control": "whether a log follows",
    "transformers:Trainer()data_collator": "batches are cast before they are moved",
    "transformers:Trainer()is_deepspeed_enabled": "casts that stock makes under DeepSpeed",
    "transformers:Trainer()is_fsdp_enabled": "towers that cannot be asked",
    "transformers:Trainer()optimizer": "the update of the report",
    "transformers:Trainer()state": "steps, epochs and logs",
    "transformers:Trainer()_globalstep_last_logged": "logged losses of a resumed run",
    "transformers:Trainer()_total_loss_scalar": "train_loss of a resumed run",
    "transformers:TrainerState.best_model_checkpoint": "what rotation keeps",
    "transformers:TrainingArguments.ignore_data_skip": "whether a resume is exact",
    "transformers:TrainingArguments.parallel_mode": "DataParallel is refused in rollouts",
    "transformers:TrainingArguments.save_only_model": "what a checkpoint holds",
    "transformers:TrainingArguments.should_save": "who writes a checkpoint",
    "transformers.generation:GenerationMixin._sample": "the sampler's log-probabilities are recorded around it",
    "transformers:GenerationConfig.get_generation_mode": "whether a rollout samples from one distribution",
    "transformers:PreTrainedModel.get_input_embeddings": "where the text model begins",
    "transformers:PreTrainedModel.get_output_embeddings": "the head",
    "transformers:PretrainedConfig.get_text_config": "the config of the text model",
    "transformers:PretrainedConfig.sub_configs": "the dtypes that a saved config names",
    # -- TRL
    "trl:GRPOTrainer._generate_single_turn": "rollouts compute as training does",
    "trl:GRPOTrainer._generate_and_score_completions": "media of a rollout are cast before they are buffered",
    "trl:GRPOTrainer._get_per_token_logps_and_entropies": "the trainer's log-probabilities",
    "trl:GRPOTrainer._compute_loss": "log-probabilities of the first loss",
    "trl:GRPOTrainer._calculate_rewards": "rewards that are missing or infinite",
    "trl:RLOOTrainer._generate_single_turn": "rollouts compute as training does",
    "trl:RLOOTrainer._generate_and_score_completions": "media of a rollout are cast before they are buffered",
    "trl:RLOOTrainer._get_per_token_logps_and_entropies": "the trainer's log-probabilities",
    "trl:RLOOTrainer._compute_loss": "log-probabilities of the first loss",
    "trl:RLOOTrainer._calculate_rewards": "rewards that are missing or infinite",
    "trl:GRPOTrainer()_buffered_inputs": "the window that a resumed run goes on with",
    "trl:GRPOTrainer()_metrics": "where TRL keeps what the next log says",
    "trl:GRPOTrainer()_step": "the place in the window",
    "trl:GRPOTrainer()generation_config": "how a rollout samples",
    "trl:GRPOTrainer()ref_model": "a synced reference is saved with a checkpoint",
    "trl:GRPOTrainer()reward_func_names": "which reward function is named",
    "trl:GRPOTrainer()rollout_func": "rollouts that the trainer does not make itself",
    "trl:GRPOTrainer()temperature": "what the logits are divided by",
    "trl:RLOOTrainer()_buffered_inputs": "the window that a resumed run goes on with",
    "trl:RLOOTrainer()_metrics": "where TRL keeps what the next log says",
    "trl:RLOOTrainer()_step": "the place in the window",
    "trl:RLOOTrainer()generation_config": "how a rollout samples",
    "trl:RLOOTrainer()temperature": "what the logits are divided by",
    "trl:SFTTrainer._name": "the default folder",
    "trl:SFTTrainer.create_model_card": "the report goes into the model card",
    "trl:GRPOConfig.steps_per_generation": "the window of buffered rollouts",
    "trl:GRPOConfig.num_iterations": "the window of buffered rollouts",
    "trl:GRPOConfig.sync_ref_model": "whether the reference changes",
    "trl:GRPOConfig.use_vllm": "who samples",
    "trl:GRPOConfig.vllm_mode": "who samples",
    "trl:GRPOConfig.cast_lm_head_to_fp32": "a head that autocast must not round again",
    "trl:GRPOConfig.vllm_importance_sampling_mode": "which tokens TRL masks",
    "trl.generation.vllm_generation:VLLMGeneration.sync_weights": "merged weights go to vLLM",
    # -- PEFT
    "peft.tuners.tuners_utils:BaseTunerLayer.adapter_layer_names": "which parameters are adapters",
    "peft.tuners.tuners_utils:BaseTunerLayer.get_base_layer": "the layer below an adapter",
    "peft.tuners.tuners_utils:BaseTunerLayer.active_adapters": "what is merged",
    "peft.tuners.tuners_utils:BaseTunerLayer.disable_adapters": "what is merged",
    "peft.tuners.tuners_utils:BaseTunerLayer.merge": "what the merged weights are",
    "peft.utils.other:AuxiliaryTrainingWrapper.active_adapters": "which copy of a module computes",
    "peft.utils.other:AuxiliaryTrainingWrapper.disable_adapters": "which copy of a module computes",
    "peft.utils.other:ModulesToSaveWrapper()modules_to_save": "copies of modules that are trained whole",
    "peft.utils.other:ModulesToSaveWrapper()original_module": "what they are copies of",
    "peft:PeftModel.get_base_model": "the model below the adapters",
    "peft:PeftModel()peft_config": "which adapters there are",
    "peft:LoraConfig.init_lora_weights": "whether a fresh adapter is zero",
    "peft:PeftConfig.peft_type": "whether an adapter casts what enters it",
    "peft:PeftConfig.base_model_name_or_path": "what a saved adapter is for",
    # -- accelerate
    "accelerate:Accelerator.autocast": "the compute context of training, for rollouts",
    "accelerate:Accelerator.mixed_precision": "what was really built",
    "accelerate:Accelerator()native_amp": "whether fp16 was really built",
    "accelerate:Accelerator()scaler": "the loss scaler",
    "accelerate:Accelerator()_optimizers": "whose step was skipped",
    "accelerate:Accelerator.optimizer_step_was_skipped": "engines that scale by themselves",
    "accelerate:Accelerator.gather": "metrics of all ranks",
    "accelerate:Accelerator.reduce": "metrics of all ranks",
    "accelerate:Accelerator.unwrap_model": "a reference without its wrappers",
    "accelerate:Accelerator.wait_for_everyone": "checkpoints are complete for all ranks or none",
    "accelerate:Accelerator.is_main_process": "who writes",
    "accelerate.state:AcceleratorState()deepspeed_plugin": "the stage of ZeRO",
    # -- bitsandbytes
    "bitsandbytes.nn:Linear4bit()compute_dtype": "what a 4-bit layer multiplies in",
    "bitsandbytes.nn:Linear4bit()compute_type_is_set": "that it stays so",
    "bitsandbytes.nn:Linear4bit()quant_state": "what it dequantises to",
    "bitsandbytes.nn:Linear4bit()support_avx512bf16_for_cpu": "whether an evaluation on a CPU packs it otherwise",
    "bitsandbytes.nn:Linear8bitLt()state": "where an 8-bit layer keeps its scales",
    "bitsandbytes.nn:Params4bit()quant_state": "what it dequantises to",
    "bitsandbytes.functional:QuantState()absmax": "scales, left as they are",
    "bitsandbytes.functional:QuantState()dtype": "what a weight is dequantised to",
    "bitsandbytes.functional:QuantState()nested": "scales that are packed themselves",
    "bitsandbytes.functional:QuantState()offset": "scales that are packed themselves",
    "bitsandbytes.functional:QuantState()quant_type": "nf4 or fp4",
    "bitsandbytes.functional:QuantState()state2": "scales that are packed themselves",
    "bitsandbytes.functional:dequantize_4bit": "weights as a layer computes with them",
    "bitsandbytes.functional:int8_vectorwise_dequant": "weights as a layer computes with them",
    # -- torch
    "torch.amp:GradScaler._get_scale_async": "whether a step was skipped, without waiting for the device",
    "torch.nn:Module.register_forward_pre_hook": "the boundaries",
}
"""`module:Class.name` is a member, a field or an annotation of a class, `module:Class()name` an attribute that one of
its methods sets, `module:name` a function. What for."""

OVERRIDDEN_IN_PART = {
    ROLLOUT_METHOD: GENERATING,
    BUFFER_METHOD: GENERATING,
    "_get_per_token_logps_and_entropies": GENERATING,
    "_compute_loss": GENERATING,
    "_calculate_rewards": GENERATING,
}
"""Methods that not every trainer has, and those that must have them."""


def imports() -> Iterator[tuple[str, str]]:
    """Every name of upstream that the package imports, with its module."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] in UPSTREAM:
                yield from ((node.module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] in UPSTREAM)


IMPORTS = sorted(set(imports()))


def handed_on() -> set[str]:
    """Names of the methods that our classes around a trainer hand on by `super()`, apart from our own."""
    own = [c for c in {*PrecisionMixin.__mro__, *PrecisionBase.__mro__} if c.__module__.startswith("safe_trainers")]
    called: set[str] = set()
    for file in {inspect.getfile(cls) for cls in own}:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
        names = {cls.__name__ for cls in own}
        for definition in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in names):
            called |= {
                node.attr for node in ast.walk(definition)
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()"
            }  # fmt: skip
    upstream = {name for cls in (transformers.Trainer, *ALL) for base in cls.__mro__ for name in vars(base)}
    ours = {name for cls in own for name in vars(cls)} - upstream
    return {name for name in called if not name.startswith("__")} - (ours - set(OVERRIDDEN_IN_PART))


def set_by(cls: type) -> set[str]:
    """Attributes that the methods of a class, or of its upstream bases, set on anything."""
    found: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] not in UPSTREAM:
            continue
        for member in vars(base).values():
            code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", None)
            if code is not None:
                found |= {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"}
    return found


@pytest.mark.parametrize(("module", "name"), IMPORTS, ids=[f"{module}.{name}" for module, name in IMPORTS])
def test_everything_that_is_imported_is_there(module, name, monkeypatch):
    monkeypatch.setenv("TRACKIO_SPACE_ID", "")  # TRL's scripts set it when they are imported
    if module.startswith("bitsandbytes"):
        pytest.importorskip("bitsandbytes")
    found = importlib.import_module(module)
    assert not name or hasattr(found, name), f"{module}.{name} is gone"


@pytest.mark.parametrize("relied", RELIED)
def test_everything_that_is_relied_on_is_there(relied):
    module, _, path = relied.partition(":")
    if module.startswith("bitsandbytes"):
        pytest.importorskip("bitsandbytes")
    owner = importlib.import_module(module)
    gone = f"{relied} is gone: {RELIED[relied]}"
    if "()" in path:
        cls, _, name = path.partition("()")
        assert hasattr(owner, cls), gone
        assert name in set_by(getattr(owner, cls)) or hasattr(getattr(owner, cls), name), gone
        return
    *outer, name = path.split(".")
    for part in outer:
        assert hasattr(owner, part), gone
        owner = getattr(owner, part)
    known = hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", {})
    assert known or name in {
        n for base in getattr(owner, "__mro__", ()) for n in vars(base).get("__annotations__", {})
    }, gone


@pytest.mark.parametrize("method", sorted(handed_on()))
def test_everything_that_is_overridden_is_there(method):
    """`super().method()` of ours reaches something of upstream's, in each trainer that it is called in."""
    for trainer in OVERRIDDEN_IN_PART.get(method, ALL):
        assert hasattr(trainer, method), f"{trainer.__name__}.{method} is gone, which ours overrides"


@pytest.mark.parametrize("trainer", GENERATING)
@pytest.mark.parametrize("method", [ROLLOUT_METHOD, BUFFER_METHOD, "_prepare_inputs"])
def test_generating_trainers_have_the_hooks_themselves(trainer, method):
    assert method in vars(trainer), f"{trainer.__name__}.{method} is gone: the rollout is no longer covered"


@pytest.mark.parametrize("trainer", ALL)
def test_trainers_descend_from_the_base_below_which_ours_sits(trainer):
    lowest = trl_bases(trainer)[-1]
    assert lowest.__bases__ == (transformers.Trainer,), "PrecisionBase would no longer be reached through super()"


@pytest.mark.parametrize("trainer", ALL)
@pytest.mark.parametrize("argument", ["model", "args", "processing_class", "peft_config", "train_dataset"])
def test_arguments_are_there_by_name(trainer, argument):
    assert argument in inspect.signature(trainer.__init__).parameters


@pytest.mark.parametrize("argument", ["model", "args", "processing_class", "train_dataset"])
def test_trainer_takes_what_the_peft_hook_reads(argument):
    assert argument in inspect.signature(transformers.Trainer.__init__).parameters


def test_preparing_a_batch_goes_through_the_virtual_method_with_the_whole_mapping():
    seen = []

    class Watching(transformers.Trainer):
        is_deepspeed_enabled = False

        def __init__(self):
            self.args = SimpleNamespace(past_index=-1)

        def _prepare_input(self, data):
            seen.append(data)
            return data

    batch = {"pixel_values": 1}
    assert Watching()._prepare_inputs(batch) == batch
    assert seen[0] is batch


@pytest.mark.parametrize("config", [trl.GRPOConfig, trl.RLOOConfig, trl.SFTConfig, trl.RewardConfig])
@pytest.mark.parametrize("field", ["bf16", "fp16", "use_cpu", "model_init_kwargs", "learning_rate", "optim"])
def test_configs_have_the_fields(config, field):
    assert field in config.__dataclass_fields__


@pytest.mark.parametrize("trainer", ALL)
def test_adapters_are_made_by_the_name_that_is_captured(trainer):
    modules = [importlib.import_module(base.__module__) for base in trl_bases(trainer)]
    helpers = {
        value.__module__ for module in modules for value in vars(module).values()
        if inspect.isfunction(value) and value.__module__.split(".")[0] == "trl"
    }  # fmt: skip
    found = [m for m in [*modules, *map(importlib.import_module, helpers)] if MAKER in vars(m)]
    assert found, f"no module of {trainer.__name__} calls {MAKER}: adapters of a quantised base would be rounded"


def test_a_fused_head_is_told_of_float32_where_there_is_one():
    for trainer in ALL:
        fuse = vars(importlib.import_module(trainer.__module__)).get(FUSER)
        assert fuse is None or "cast_lm_head_to_fp32" in inspect.signature(fuse).parameters


def test_engines_of_vllm_are_built_where_they_are_captured():
    names = {c for f in vars(importlib.import_module(VLLM_MODULE).VLLMGeneration).values() if hasattr(f, "__code__")
             for c in f.__code__.co_names}  # fmt: skip
    assert ENGINE in names, f"{VLLM_MODULE} no longer builds an engine by the name {ENGINE}"


def test_generate_takes_a_function_and_its_own_sampling_takes_what_that_is_given():
    assert "custom_generate" in inspect.signature(transformers.GenerationMixin.generate).parameters
    given = inspect.signature(transformers.GenerationMixin._sample).parameters
    for name in ("input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus"):
        assert name in given, f"GenerationMixin._sample no longer takes {name}"


def test_rotation_is_upstreams():
    from transformers import trainer_utils

    new = hasattr(trainer_utils, "rotate_checkpoints") and hasattr(trainer_utils, "sort_checkpoints")
    assert new or hasattr(transformers.Trainer, "_rotate_checkpoints")


def test_peft_has_an_unpacked_class_beside_each_packed_one():
    pytest.importorskip("bitsandbytes")
    from peft.tuners.lora import bnb, layer

    assert issubclass(bnb.Linear4bit, torch.nn.Module)
    assert issubclass(bnb.Linear8bitLt, torch.nn.Module)
    assert hasattr(layer, "Linear")


@pytest.mark.parametrize("name", ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"])
def test_the_scalers_state_holds_what_the_config_sets(name):
    assert name in torch.amp.GradScaler("cpu").state_dict()
