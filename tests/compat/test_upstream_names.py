"""The contract with upstream: each name that the package relies on, and what for. A future release that loses one is
named here, before anything else fails."""

import inspect
from types import SimpleNamespace

import pytest
import torch
import transformers
import trl
from accelerate import Accelerator

from safe_trainers.contract import BUFFER_METHOD, ROLLOUT_METHOD, trl_bases


GENERATING = [trl.GRPOTrainer, trl.RLOOTrainer]
ALL = [*GENERATING, trl.SFTTrainer, trl.RewardTrainer]


@pytest.mark.parametrize("trainer", GENERATING)
@pytest.mark.parametrize("method", [ROLLOUT_METHOD, BUFFER_METHOD, "_prepare_inputs"])
def test_generating_trainers_have_the_hooks(trainer, method):
    assert method in vars(trainer), f"{trainer.__name__}.{method} is gone: the rollout is no longer covered"


@pytest.mark.parametrize("trainer", ALL)
def test_trainers_descend_from_the_base_below_which_ours_sits(trainer):
    lowest = trl_bases(trainer)[-1]
    assert lowest.__bases__ == (transformers.Trainer,), "PrecisionBase would no longer be reached through super()"


@pytest.mark.parametrize("trainer", ALL)
@pytest.mark.parametrize("argument", ["model", "args", "processing_class", "peft_config", "train_dataset"])
def test_arguments_are_there_by_name(trainer, argument):
    assert argument in inspect.signature(trainer.__init__).parameters


@pytest.mark.parametrize("argument", ["model", "args", "processing_class"])
def test_trainer_takes_what_the_peft_hook_reads(argument):
    assert argument in inspect.signature(transformers.Trainer.__init__).parameters


@pytest.mark.parametrize("method", ["_prepare_input", "_prepare_inputs", "create_accelerator_and_postprocess"])
def test_trainer_has_the_methods_that_are_overridden(method):
    assert method in vars(transformers.Trainer)


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


@pytest.mark.parametrize("name", ["autocast", "mixed_precision"])
def test_accelerator_has_what_the_policy_reads(name):
    assert hasattr(Accelerator, name)


@pytest.mark.parametrize("config", [trl.GRPOConfig, trl.RLOOConfig, trl.SFTConfig, trl.RewardConfig])
@pytest.mark.parametrize("field", ["bf16", "fp16", "use_cpu", "model_init_kwargs"])
def test_configs_have_the_flags(config, field):
    assert field in config.__dataclass_fields__


@pytest.mark.parametrize("method", ["get_input_embeddings", "get_output_embeddings"])
def test_models_say_where_their_embeddings_are(method):
    assert hasattr(transformers.PreTrainedModel, method)


def test_peft_marks_its_layers():
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    assert hasattr(BaseTunerLayer, "adapter_layer_names")
    assert "modules_to_save" in inspect.signature(ModulesToSaveWrapper.__init__).parameters or hasattr(
        ModulesToSaveWrapper, "adapter_layer_names"
    )


OVERRIDDEN_FOR_CHECKPOINTS = [
    "train", "_save_checkpoint", "_push_from_checkpoint", "_save", "_get_output_dir", "_load_from_checkpoint",
    "_load_best_model", "_load_rng_state", "_load_scaler", "_maybe_log_save_evaluate", "training_step",
    "create_accelerator_and_postprocess",
]  # fmt: skip


@pytest.mark.parametrize("method", OVERRIDDEN_FOR_CHECKPOINTS)
def test_trainer_has_what_checkpoints_and_the_scaler_override(method):
    assert method in vars(transformers.Trainer)


def test_rotation_is_upstreams():
    from transformers import trainer_utils

    new = hasattr(trainer_utils, "rotate_checkpoints") and hasattr(trainer_utils, "sort_checkpoints")
    assert new or hasattr(transformers.Trainer, "_rotate_checkpoints")


@pytest.mark.parametrize("trainer", GENERATING)
@pytest.mark.parametrize("name", ["_step", "_buffered_inputs", "_metrics"])
def test_generating_trainers_keep_their_window_where_it_is_saved(trainer, name):
    assert name in trainer.__init__.__code__.co_names


@pytest.mark.parametrize("name", ["scale", "growth_factor", "backoff_factor", "growth_interval"])
def test_the_scalers_state_holds_what_the_config_sets(name):
    assert name in torch.amp.GradScaler("cpu").state_dict()
