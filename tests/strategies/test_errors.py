"""Bad input is refused before any collective, with the argument and the mend."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lightning_moe.strategies.fabric
import lightning_moe.strategies.pytorch
from helpers.models import VOCABULARY, qwen3_moe
from helpers.processes import run
from helpers.training import Task, loader, my_share, trainer
from lightning_moe import ChunkedEPStrategy, RecomputePolicy

FLAVOURS = [
    ChunkedEPStrategy,
    lightning_moe.strategies.fabric.ChunkedEPStrategy,
    lightning_moe.strategies.pytorch.ChunkedEPStrategy,
]


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_chunks": 0}, "`num_chunks`.*at least 1.*got 0"),
        ({"num_chunks": 1.5}, "`num_chunks`.*got 1.5"),
        (
            {"dispatcher": "carrier_pigeon"},
            "`dispatcher`.*'auto', 'local', 'nvlink', 'deep_ep', 'all_to_all'.*'carrier_pigeon'",
        ),
        ({"recompute": "sometimes"}, "`recompute`.*'none', 'selective', 'full'.*'sometimes'"),
        ({"expert_parallel_size": 0}, "`expert_parallel_size`.*positive integer.*got 0"),
        ({"expert_parallel_size": "all"}, "`expert_parallel_size`.*'auto'.*got 'all'"),
    ],
)
def test_arguments_are_checked_at_construction(flavour, arguments, message):
    with pytest.raises(ValueError, match=message):
        flavour(**arguments)


def test_unknown_mode():
    with pytest.raises(ValueError, match="`routed`.*'none', 'act', 'dispatch', 'full'.*'half'"):
        RecomputePolicy(routed="half")


def set_up(strategy_arguments, build, precision="32-true", world_size=1):
    """Every collective is forbidden: an error must come before the first one."""
    fabric = Fabric(
        accelerator="cpu", devices=world_size, strategy=ChunkedEPStrategy(**strategy_arguments), precision=precision
    )
    fabric.launch()
    model = build()
    for name in ("all_reduce", "all_to_all_single", "broadcast", "all_gather_into_tensor", "barrier"):
        setattr(torch.distributed, name, _forbidden)
    fabric.setup(model)


def _forbidden(*args, **kwargs):
    raise RuntimeError("a collective ran before the error")


def hf():
    return qwen3_moe(torch.float32)


def dense():
    return nn.Sequential(nn.Linear(4, 4))


def with_ddp():
    return nn.Sequential(DistributedDataParallel(hf()))


def with_fsdp2():
    model = hf()
    fully_shard(model.model.layers[1].self_attn)
    return model


def mixed_dtypes():
    model = hf()
    model.model.layers[0].input_layernorm.bfloat16()
    return model


def odd_sizes():
    return qwen3_moe(torch.float32, hidden_size=14, moe_intermediate_size=13, num_attention_heads=1, head_dim=14)


def compiled():
    model = hf()
    model.model.layers[0] = torch.compile(model.model.layers[0])
    return model


@pytest.mark.parametrize(
    ("arguments", "build", "world_size", "message"),
    [
        (
            {"expert_parallel_size": 3},
            hf,
            3,
            "`expert_parallel_size=3` must divide the number of experts.*8.*fit.*: 1;",
        ),
        (
            {"expert_parallel_size": 2},
            hf,
            3,
            "`expert_parallel_size=2` must divide the number of processes, 3.*: 1, 3;",
        ),
        ({"dispatcher": "local"}, hf, 2, "`dispatcher='local'`.*2 ranks.*'auto'"),
        ({}, dense, 1, "No mixture-of-experts block.*`Sequential`.*Qwen3MoeSparseMoeBlock"),
        ({}, with_ddp, 1, "`0` is already wrapped by DistributedDataParallel"),
        ({}, with_fsdp2, 1, r"`model.layers.1.self_attn` is already wrapped by fully_shard"),
        ({}, compiled, 1, "`model.layers.0` was compiled"),
        ({}, mixed_dtypes, 1, "several dtypes .*bfloat16.*float32.*`precision='bf16-mixed'`"),
        (
            {"expert_parallel_size": 2},
            odd_sizes,
            6,
            "`expert_parallel_size=2` leaves 3 ranks .*(8, 26, 14).*: 1;|: 1\\.",
        ),
    ],
)
def test_models_and_meshes_are_checked_at_setup(arguments, build, world_size, message):
    with pytest.raises(AssertionError, match=message) as error:
        run(set_up, world_size, arguments, build, "32-true", world_size, init=False, timeout=60)
    assert "a collective ran" not in str(error.value)


def test_half_precision_is_not_served():
    with pytest.raises(ValueError, match="precision='16-true'.*'32-true'.*'bf16-mixed'"):
        Fabric(accelerator="cpu", strategy=ChunkedEPStrategy(), precision="16-true")
    with pytest.raises(ValueError, match="precision='16-true'.*'32-true'.*'bf16-mixed'"):
        trainer(ChunkedEPStrategy(), 1, precision="16-true")


class SharedParameter(Task):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.model.lm_head.weight


class OwnParameter(Task):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))


def fit(make_task, options):
    trainer(ChunkedEPStrategy(), 1, **options()).fit(make_task(), loader(my_share(1, 0, 1)))


def swa():
    return {"callbacks": [StochasticWeightAveraging(1e-3)]}


def two_averages():
    return {"callbacks": [EMAWeightAveraging(), WeightAveraging()]}


def anomaly():
    return {"detect_anomaly": True}


@pytest.mark.parametrize(
    ("make_task", "options", "message"),
    [
        (OwnParameter, dict, "`OwnParameter` owns the parameters 'temperature' directly"),
        (SharedParameter, dict, "`Qwen3MoeForCausalLM.lm_head.weight` and `Linear.weight` are one parameter"),
        (Task, swa, "`StochasticWeightAveraging` averages whole weights.*Take `WeightAveraging`"),
        (Task, two_averages, "holds one average.*2 callbacks.*`EMAWeightAveraging`, `WeightAveraging`"),
        (Task, anomaly, "detect_anomaly"),
    ],
)
def test_what_cannot_work_in_the_trainer_is_refused(make_task, options, message):
    with pytest.raises(AssertionError, match=message):
        run(fit, 1, make_task, options, init=False)


def optimizer_with_state():
    fabric = Fabric(accelerator="cpu", devices=1, strategy=ChunkedEPStrategy())
    fabric.launch()
    model = hf()
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=my_share(1, 0, 1)[0]).logits.mean().backward()
    optimizer.step()
    fabric.setup(model, optimizer)


def optimizer_of_another_model():
    fabric = Fabric(accelerator="cpu", devices=1, strategy=ChunkedEPStrategy())
    fabric.launch()
    fabric.setup(hf(), torch.optim.AdamW(hf().parameters()))


def optimizer_of_another_model_at_the_second_set_up():
    fabric = Fabric(accelerator="cpu", devices=1, strategy=ChunkedEPStrategy())
    fabric.launch()
    model = hf()
    fabric.setup(model)
    fabric.setup(model, torch.optim.AdamW(hf().parameters()))


@pytest.mark.parametrize(
    ("go", "message"),
    [
        (
            optimizer_of_another_model_at_the_second_set_up,
            "holds parameters that are not in the model it is set up with",
        ),
        (optimizer_with_state, "`AdamW` has made steps already"),
        (optimizer_of_another_model, "holds parameters that are not in the model it is set up with"),
    ],
)
def test_optimizers_that_cannot_follow_their_parameters(go, message):
    with pytest.raises(AssertionError, match=message):
        run(go, 1, init=False)


def set_up_twice(first, second):
    model = hf()
    for num_chunks, precision in (first, second):
        strategy = ChunkedEPStrategy(num_chunks=num_chunks)
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, precision=precision)
        fabric.launch()
        fabric.setup(model)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((3, "32-true"), "was already set up with .*num_chunks=2.*num_chunks=3"),
        ((2, "bf16-mixed"), "precision '32-true', and cannot be set up again.*'bf16-mixed'"),
    ],
)
def test_a_model_is_not_set_up_again_with_other_arguments(second, message):
    with pytest.raises(AssertionError, match=message):
        run(set_up_twice, 1, (2, "32-true"), second, init=False)


def save_as_hugging_face_does(folder):
    fabric = Fabric(accelerator="cpu", devices=1, strategy=ChunkedEPStrategy())
    fabric.launch()
    fabric.setup(hf()).module.save_pretrained(folder)


def test_save_pretrained_says_what_to_do_instead(tmp_path):
    with pytest.raises(AssertionError, match="`save_pretrained` cannot save.*lightning_moe.save_huggingface"):
        run(save_as_hugging_face_does, 1, str(tmp_path), init=False)
    assert not list(tmp_path.iterdir())
