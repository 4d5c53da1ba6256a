"""The casts at single operations: when they act, which dtype they choose, and what they leave alone."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from safe_trainers.boundaries.operation_casts import MatchDtypes, Places, guard_operations


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def test_an_operation_that_works_is_not_changed():
    found = []
    with MatchDtypes(found.append):
        total = torch.ones(2, dtype=BF16) + torch.ones(2)
    assert (total.dtype, found) == (FP32, [])


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (torch.ones(2, 3), nn.Parameter(torch.ones(3, 2, dtype=BF16)), BF16),
        (nn.Parameter(torch.ones(2, 3)), torch.ones(3, 2, dtype=BF16), FP32),
        (torch.ones(2, 3), torch.ones(3, 2, dtype=FP16), FP16),
    ],
)
def test_a_product_has_the_dtype_of_its_parameter_or_of_its_half_factor(left, right, expected):
    with pytest.raises(RuntimeError, match="dtype"):
        left @ right
    found = []
    with MatchDtypes(found.append):
        product = left @ right
    assert (product.dtype, product.unique().item(), len(found)) == (expected, 3.0, 1)


def test_keyword_arguments_and_functions_are_reached():
    weight = nn.Parameter(torch.full((4, 3, 2, 2), 0.3, dtype=BF16))
    pixels = torch.rand(1, 3, 4, 4)
    with MatchDtypes():
        result = functional.conv2d(input=pixels, weight=weight, stride=2)
    assert torch.equal(result, functional.conv2d(pixels.to(BF16), weight, stride=2))


@pytest.mark.parametrize(("held", "given"), [(BF16, FP32), (FP32, BF16), (FP16, BF16)])
@pytest.mark.parametrize("kind", [torch.Tensor.clone, nn.Parameter])
def test_values_are_written_into_the_tensor_itself(kind, held, given):
    target, values = torch.zeros(4, dtype=held), kind(torch.tensor([0.1, 0.2], dtype=given))
    mask = torch.tensor([True, False, True, False])
    with pytest.raises(RuntimeError, match="dtype"):
        target[mask] = values
    with MatchDtypes(), torch.no_grad():
        target[mask] = values
        merged = torch.zeros(4, dtype=held).masked_scatter(mask, values)
    assert torch.equal(target[mask], values.to(held))
    assert torch.equal(merged, target)
    assert merged.dtype == held


def test_autocast_refuses_the_other_half_format_alone():
    parts = [torch.ones(2, dtype=FP16), torch.ones(2, dtype=BF16)]
    with torch.autocast("cpu", BF16):
        with pytest.raises(RuntimeError, match="ScalarType"):
            torch.cat(parts)
        with MatchDtypes():
            assert torch.equal(torch.cat(parts).float(), torch.ones(4))


@pytest.mark.parametrize(
    "operation",
    [
        lambda: torch.ones(2, 3) @ torch.ones(2, 3),
        lambda: torch.ones(2, 3) @ torch.ones(2, 3, dtype=BF16),
        lambda: torch.ones(2, 3, dtype=BF16).index_add_(0, torch.tensor([5]), torch.ones(1, 3)),
        lambda: torch.matmul(torch.ones(2, 2), torch.ones(2, 2, dtype=BF16), out=torch.zeros(2, 2)),
    ],
)
def test_other_errors_are_raised_as_they_are(operation):
    with pytest.raises((RuntimeError, IndexError)) as plain:
        operation()
    with MatchDtypes(), pytest.raises(plain.type) as found:
        operation()
    assert str(found.value) == str(plain.value)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.rand(3, 3, dtype=BF16))

    def forward(self, values):
        return self.layer(values) @ self.weight


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Own()

    def forward(self, values):
        return self.inner(values)


def test_the_innermost_module_is_found():
    model = Outer()
    places = Places(model)
    with MatchDtypes(places.add):
        model(torch.rand(2, 3))
    assert places.operations == {"inner": "matmul"}


def test_a_replaced_forward_survives_copies_and_checkpointing():
    model = Own()
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.rand(2, 3))
    assert guard_operations(model)
    assert not guard_operations(model)
    copied = copy.deepcopy(model)
    assert copied.forward.__self__ is copied
    values = torch.rand(2, 3, requires_grad=True)
    expected = model(values)
    assert expected.dtype == BF16
    expected.sum().backward()
    gradient = values.grad.clone()
    values.grad = None
    checkpoint(copied, values, use_reentrant=False).sum().backward()
    assert torch.equal(values.grad, gradient)
    assert copied.weight.grad.dtype == BF16


def test_a_compiled_model_keeps_the_casts():
    model = Outer()
    assert guard_operations(model.inner)
    values = torch.rand(2, 3)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(values), model(values))
    compiled(values).sum().backward()
    assert model.inner.weight.grad.dtype == BF16


def test_a_module_without_a_method_of_its_class_is_left_alone():
    model = Own()
    model.forward = lambda values: values
    assert not guard_operations(model)
