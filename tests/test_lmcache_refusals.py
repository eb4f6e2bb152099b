"""What LMCache's transfers refuse: each argument's wrong values, and nothing has changed then.

All calls are right but for the one argument, which the error names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvloom.lmcache as ops

DTYPE = torch.bfloat16
NL, NB, BS, NH, HS = 3, 7, 4, 5, 6
D, PBS = NH * HS, NB * BS
SLOTS = [9, 22, -1, 4, 5, 0, 17, 27]
T = len(SLOTS)
BLOCKS = [3, 1, 6, 0, 4]

Arguments = dict[str, Any]


def random(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    found = torch.empty(shape, dtype=dtype)
    found.view(torch.uint8).random_(generator=torch.Generator().manual_seed(len(shape)))
    return found


def layers() -> list[torch.Tensor]:
    """Of format 6, for which every size is needed."""
    return [random(2, NB, NH, BS, HS) for _ in range(NL)]


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([one.data_ptr() for one in tensors])


def described(**changes: Any) -> Any:
    found = ops.PageBufferShapeDesc()
    sizes = {"nl": NL, "nb": NB, "bs": BS, "nh": NH, "hs": HS, "element_size": 2, "kv_size": 2}
    for name, value in {**sizes, **changes}.items():
        setattr(found, name, value)
    return found


def multi_layer_kv_transfer() -> tuple[Arguments, list[torch.Tensor]]:
    tensors, chunk = layers(), random(2, NL, T, D)
    call = {
        "key_value": chunk,
        "key_value_ptrs": tensors,
        "slot_mapping": torch.tensor(SLOTS),
        "paged_memory_device": torch.device("cpu"),
        "page_buffer_size": PBS,
        "engine_kv_format": 6,
        "block_size": BS,
        "head_size": HS,
    }
    return call, [*tensors, chunk]


def multi_layer_kv_transfer_unilateral() -> tuple[Arguments, list[torch.Tensor]]:
    tensors, chunk = [random(PBS, D) for _ in range(2 * NL)], random(2, NL, T, D)
    call = {
        "key_value": chunk,
        "key_value_ptrs": tensors,
        "slot_mapping": torch.tensor(SLOTS),
        "paged_memory_device": torch.device("cpu"),
        "page_buffer_size": PBS,
        "engine_kv_format": 6,
    }
    return call, [*tensors, chunk]


def multi_layer_block_kv_transfer() -> tuple[Arguments, list[torch.Tensor]]:
    tensors, objects = layers(), [random(2, NL, 2 * BS, D) for _ in range(3)]
    call = {
        "paged_buffer_ptrs_tensor": tensors,
        "lmcache_objects_ptrs": objects,
        "block_ids": torch.tensor(BLOCKS),
        "device": torch.device("cpu"),
        "shape_desc": described(),
        "lmcache_chunk_size": 2 * BS,
        "engine_kv_format": 6,
        "skip_prefix_n_blocks": 0,
    }
    return call, [*tensors, *objects]


def single_layer_kv_transfer() -> tuple[Arguments, list[torch.Tensor]]:
    tensor, chunk = random(2, NB, NH, BS, HS), random(2, T, D)
    call = {
        "lmc_key_value_cache": chunk,
        "vllm_key_value_cache": tensor,
        "slot_mapping": torch.tensor(SLOTS),
        "engine_kv_format": 6,
        "token_major": False,
    }
    return call, [tensor, chunk]


def single_layer_kv_transfer_sgl() -> tuple[Arguments, list[torch.Tensor]]:
    keys, values, chunk = random(NB, BS, NH, HS), random(NB, BS, NH, HS), random(2, T, D)
    call = {
        "lmc_key_value_cache": chunk,
        "sgl_key_cache": keys,
        "sgl_value_cache": values,
        "slot_mapping": torch.tensor(SLOTS),
        "token_major": False,
    }
    return call, [keys, values, chunk]


def load_and_reshape_flash() -> tuple[Arguments, list[torch.Tensor]]:
    keys, values, chunk = random(NB, BS, NH, HS), random(NB, BS, NH, HS), random(2, NL, T, D)
    call = {
        "key_value": chunk,
        "key_cache": keys,
        "value_cache": values,
        "slot_mapping": torch.tensor(SLOTS),
        "layer_idx": 1,
    }
    return call, [keys, values, chunk]


reshape_and_cache_back_flash = load_and_reshape_flash

SCENES: dict[str, Callable[[], tuple[Arguments, list[torch.Tensor]]]] = {
    "multi_layer_kv_transfer": multi_layer_kv_transfer,
    "multi_layer_kv_transfer_unilateral": multi_layer_kv_transfer_unilateral,
    "multi_layer_block_kv_transfer": multi_layer_block_kv_transfer,
    "single_layer_kv_transfer": single_layer_kv_transfer,
    "single_layer_kv_transfer_sgl": single_layer_kv_transfer_sgl,
    "load_and_reshape_flash": load_and_reshape_flash,
    "reshape_and_cache_back_flash": reshape_and_cache_back_flash,
}
DIRECTED = [name for name in SCENES if "flash" not in name]

# Made when a test runs; a name in the error that is not the argument's own comes third.
Wrong = tuple[Callable[[], Any], type[Exception], str]


def wrong(make: Callable[[], Any], error: type[Exception], named: str = "") -> Wrong:
    return make, error, named


def value(one: Any, error: type[Exception] = ValueError, named: str = "") -> Wrong:
    return wrong(lambda: one, error, named)


DIRECTION = [value(2), value(-1), value("D2H", TypeError), value(None, TypeError)]
FORMAT = [
    *(value(99), value(-1), value("NL", TypeError), value(None, TypeError), value(1.0, TypeError)),
    *(value(14), value(17)),  # declared, without kernels
]
SLOT_MAPPING = [
    wrong(lambda: torch.tensor([*SLOTS[:-1], PBS]), ValueError),
    wrong(lambda: torch.tensor(SLOTS[:-1]), ValueError),
    wrong(lambda: torch.tensor([*SLOTS, 0]), ValueError),
    wrong(lambda: torch.zeros(512, dtype=torch.int64), ValueError),
    wrong(lambda: torch.tensor(SLOTS).float(), TypeError),
    wrong(lambda: torch.tensor(SLOTS)[None], ValueError),
    wrong(lambda: torch.zeros(T, dtype=torch.bool), TypeError),
    value(None, TypeError),
    value(7, TypeError),
]


def no_chunk(*shape: int) -> list[Wrong]:
    """What is no chunk of this shape, whose last two dimensions are tokens and rows."""
    *outer, tokens, row = shape
    return [
        value(None, TypeError),
        value([1, 2], TypeError),
        wrong(lambda: random(row), ValueError),
        wrong(lambda: random(*outer, tokens, row + 1), ValueError),
        wrong(lambda: random(*outer, tokens, row + HS), ValueError),
        wrong(lambda: random(*outer, tokens, row - HS), ValueError),
        wrong(lambda: random(*outer, tokens, 2 * row)[..., ::2], ValueError),
        wrong(lambda: random(*outer, row, tokens).mT, ValueError),
        wrong(lambda: random(*shape, dtype=torch.float32), ValueError),
        wrong(lambda: random(*shape, dtype=torch.uint8), ValueError),
        wrong(lambda: random(*shape).requires_grad_(), ValueError),
        wrong(lambda: torch.zeros(shape, dtype=DTYPE).to_sparse(), TypeError),
        wrong(lambda: random(*shape).to("meta"), ValueError),
    ]


def no_addresses(count: int) -> list[Wrong]:
    return [
        value(None, TypeError),
        value([], ValueError),
        value([1] * count, TypeError),
        value("addresses", TypeError),
        wrong(lambda: torch.ones(count - 1, dtype=torch.int64), ValueError),
        wrong(lambda: torch.ones(count + 1, dtype=torch.int64), ValueError),
        wrong(lambda: torch.tensor([*[64] * (count - 1), 0]), ValueError),
        wrong(lambda: torch.zeros(count), ValueError),
        wrong(lambda: torch.tensor([64] * count), ValueError),  # layers that share bytes
    ]


def sizes(*values: int) -> list[Wrong]:
    return [
        *map(value, values),
        value(None, TypeError),
        value(2.5, TypeError),
        value("4", TypeError),
    ]


def three_objects() -> list[torch.Tensor]:
    return [random(2, NL, 2 * BS, D) for _ in range(3)]


def quantized(*shape: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.zeros(shape), 0.1, 0, torch.quint8)


def no_cpu(device: str) -> Wrong:
    """Addresses there can't be followed yet."""
    return value(device, NotImplementedError)


def no_tensors(make: Callable[[], list[torch.Tensor]]) -> list[Wrong]:
    """Lists that are nearly the right tensors."""
    return [
        wrong(lambda: make()[:-1], ValueError),
        wrong(lambda: [*make(), *make()[:1]], ValueError),
        wrong(lambda: [make()[0]] * len(make()), ValueError),
        wrong(lambda: [*make()[:-1], make()[-1][..., :-1]], ValueError),
        wrong(lambda: [*make()[:-1], None], TypeError),
        wrong(lambda: [one.to_sparse() for one in make()], TypeError),
        wrong(lambda: [one.requires_grad_() for one in make()], ValueError),
    ]


WRONG: dict[str, dict[str, list[Wrong]]] = {
    "multi_layer_kv_transfer": {
        "key_value": [
            *no_chunk(2, NL, T, D),
            wrong(lambda: random(1, NL, T, D), ValueError),
            wrong(lambda: random(3, NL, T, D), ValueError),
        ],
        "key_value_ptrs": [*no_addresses(NL), *no_tensors(layers)],
        "slot_mapping": SLOT_MAPPING,
        "paged_memory_device": [
            *(value(None, TypeError), value("nowhere"), value(7.5, TypeError)),
            *(value("cuda"), value("meta")),
        ],
        "page_buffer_size": sizes(0, -4, PBS - 1),
        "direction": DIRECTION,
        "engine_kv_format": FORMAT,
        "block_size": sizes(-1, BS + 1),
        "head_size": sizes(-1, HS + 1, 2**70),
        "skip_prefix_n_tokens": sizes(-1, T + 1),
        "block_stride_elems": sizes(-1),
    },
    "multi_layer_kv_transfer_unilateral": {
        "key_value": no_chunk(2, NL, T, D),
        "key_value_ptrs": no_addresses(2 * NL),
        "slot_mapping": SLOT_MAPPING,
        "paged_memory_device": [value(None, TypeError), value("cuda")],
        "page_buffer_size": sizes(0, -4),
        "direction": DIRECTION,
        "engine_kv_format": [one for one in FORMAT if one[0]() != 14 and one[0]() != 17],
    },
    "multi_layer_block_kv_transfer": {
        "paged_buffer_ptrs_tensor": [*no_addresses(NL), *no_tensors(layers)],
        "lmcache_objects_ptrs": [
            *(value(None, TypeError), value("objects", TypeError), value(7, TypeError)),
            *(value([0, 0, 0]), value([-1, 64, 64]), value([1.5, 64, 64], TypeError)),
            wrong(lambda: [random(2, NL, 2 * BS, D), None, None], TypeError),
            wrong(lambda: [*three_objects(), None], TypeError),
            wrong(lambda: [*three_objects(), "a fourth that is not needed"], TypeError),
            wrong(lambda: [*three_objects()[:2], random(2, NL, BS - 1, D)], ValueError),
            wrong(lambda: [*three_objects()[:2], random(2, NL, 3 * BS, D)], ValueError),
            wrong(lambda: [2**70] * 3, ValueError),
            wrong(lambda: [quantized(2, NL, 2 * BS, 2 * D)] * 3, ValueError),
            *(
                wrong(lambda one=one: [random(2, NL, 2 * BS, D), one(), one()], error, named)
                for one, error, named in no_chunk(2, NL, 2 * BS, D)
            ),
        ],
        "block_ids": [
            wrong(lambda: torch.tensor([3, 1, NB]), ValueError),
            wrong(lambda: torch.tensor([3, -1, 2]), ValueError),
            wrong(lambda: torch.tensor([3, 1, 6, 0, 4, 2, 5]), ValueError),  # 3 objects hold 6
            wrong(lambda: torch.tensor(BLOCKS).double(), TypeError),
            wrong(lambda: torch.tensor([BLOCKS]), ValueError),
            *(value([1.0], TypeError), value(None, TypeError), value([True], TypeError)),
        ],
        "device": [value(None, TypeError), value("cuda")],
        "direction": DIRECTION,
        "shape_desc": [
            *(value(None, TypeError), value({"nl": NL}, TypeError)),
            wrong(lambda: described(nl=NL + 1), ValueError, "paged_buffer_ptrs_tensor"),
            wrong(lambda: described(nb=-1), ValueError, "shape_desc.nb"),
            wrong(lambda: described(nb=NB + 1), ValueError, "shape_desc.nb"),
            wrong(lambda: described(bs=BS + 1), ValueError, "shape_desc.bs"),
            wrong(lambda: described(hs=HS + 1), ValueError, "shape_desc.hs"),
            wrong(lambda: described(hs=2**70), ValueError, "shape_desc.hs"),
            wrong(lambda: described(nh=NH - 3), ValueError, "shape_desc.nh"),
            wrong(lambda: described(nh=NH + 1), ValueError, "shape_desc.nh"),
            wrong(lambda: described(element_size=1), ValueError, "shape_desc.element_size"),
            wrong(lambda: described(dtype=torch.float32), ValueError, "shape_desc.dtype"),
            wrong(lambda: described(dtype=torch.quint8), ValueError, "shape_desc.dtype"),
            wrong(lambda: described(kv_size=1), ValueError, "shape_desc.kv_size"),
            wrong(lambda: described(nl=None), TypeError, "shape_desc.nl"),
        ],
        "lmcache_chunk_size": sizes(0, -8, 2 * BS + 1),
        "engine_kv_format": FORMAT,
        "skip_prefix_n_blocks": sizes(-1, len(BLOCKS) + 1),
    },
    "single_layer_kv_transfer": {
        "lmc_key_value_cache": [
            *no_chunk(2, T, D),
            wrong(lambda: random(T, D), ValueError),
            wrong(lambda: random(T, 2, D), ValueError),
        ],
        "vllm_key_value_cache": [
            *(value(None, TypeError), value([], TypeError), value(64, TypeError)),
            wrong(lambda: [random(2, NB, NH, BS, HS)], TypeError),
            wrong(lambda: random(2, NB, NH, BS), ValueError),
            wrong(lambda: random(2, NB, NH, BS, 2 * HS)[..., ::2], ValueError),
            wrong(lambda: random(2, 1, NH, BS, HS).expand(2, NB, NH, BS, HS), ValueError),
            wrong(lambda: random(3, NB, NH, BS, HS), ValueError),
        ],
        "slot_mapping": SLOT_MAPPING,
        "direction": DIRECTION,
        "engine_kv_format": [*FORMAT, value(0), value(8)],
        "token_major": [value(None, TypeError), value("yes", TypeError)],
    },
    "single_layer_kv_transfer_sgl": {
        "lmc_key_value_cache": no_chunk(2, T, D),
        "sgl_key_cache": [
            value(None, TypeError),
            wrong(lambda: random(NB, BS, NH), ValueError, "sgl_value_cache"),
            wrong(lambda: random(NB, BS, NH, 2 * HS)[..., ::2], ValueError),
        ],
        "sgl_value_cache": [
            value(None, TypeError),
            wrong(lambda: random(PBS, NH, HS), ValueError),
            wrong(lambda: random(NB, BS, NH, HS + 1), ValueError),
        ],
        "slot_mapping": SLOT_MAPPING,
        "direction": DIRECTION,
        "token_major": [value(None, TypeError)],
    },
    "load_and_reshape_flash": {
        "key_value": no_chunk(2, NL, T, D),
        "key_cache": [value(None, TypeError), wrong(lambda: random(NB, BS), ValueError)],
        "value_cache": [value(None, TypeError), wrong(lambda: random(NB, BS, 1, HS), ValueError)],
        "slot_mapping": SLOT_MAPPING,
        "layer_idx": sizes(-1, NL),
    },
}
WRONG["reshape_and_cache_back_flash"] = WRONG["load_and_reshape_flash"]

# What only matters where no tensor tells sizes and places.
WRONG_BESIDE_ADDRESSES: dict[str, dict[str, list[Wrong]]] = {
    "multi_layer_kv_transfer": {
        "key_value": [wrong(lambda: random(2, NL, T, D + 1), ValueError)],
        "paged_memory_device": [*map(no_cpu, ("cuda", "meta"))],
        "page_buffer_size": sizes(0, -4, PBS - 1, BS * 2**60),
        "block_size": sizes(0, -1, BS + 1),
        "head_size": sizes(0, -1, HS + 1),
        "block_stride_elems": sizes(-1, BS * D - 1),
    },
    "multi_layer_kv_transfer_unilateral": {
        "paged_memory_device": [no_cpu("cuda")],
        "page_buffer_size": sizes(0, -4),
    },
    "multi_layer_block_kv_transfer": {
        "device": [no_cpu("cuda")],
        "shape_desc": [
            wrong(lambda: described(nl=NL + 1), ValueError, "paged_buffer_ptrs_tensor"),
            wrong(lambda: described(nl=0), ValueError, "shape_desc.nl"),
            wrong(lambda: described(nb=0), ValueError, "shape_desc.nb"),
            wrong(lambda: described(bs=0), ValueError, "shape_desc.bs"),
            wrong(lambda: described(hs=0), ValueError, "shape_desc.nh"),
            wrong(lambda: described(nh=0), ValueError, "shape_desc.nh"),
            wrong(lambda: described(element_size=3), ValueError, "shape_desc.element_size"),
            wrong(lambda: described(nb=2**60), ValueError, "shape_desc.nb"),
            wrong(lambda: described(element_size=1, dtype=torch.quint8), ValueError, "dtype"),
            wrong(lambda: described(block_stride_elems=BS * D - 1), ValueError, "block_stride"),
        ],
    },
}

CASES = [
    pytest.param(
        *(operator, argument, one, addressed),
        id=f"{operator}-{argument}-{number}{'-addresses' if addressed else ''}",
    )
    for addressed, table in ((False, WRONG), (True, WRONG_BESIDE_ADDRESSES))
    for operator, arguments in table.items()
    for argument, values in arguments.items()
    for number, one in enumerate(values)
]


def test_every_argument_of_every_operator_has_wrong_values() -> None:
    for operator, make in SCENES.items():
        directed = {"direction"} if operator in DIRECTED else set()
        optional = set()
        if operator == "multi_layer_kv_transfer":
            optional = {"skip_prefix_n_tokens", "block_stride_elems"}
        assert set(WRONG[operator]) == {*make()[0], *directed, *optional}


@pytest.mark.parametrize("operator", SCENES)
def test_the_calls_are_right_but_for_the_wrong_argument(operator: str) -> None:
    for direction in (0, 1):
        call, memory = SCENES[operator]()
        before = [one.clone() for one in memory]
        if operator in DIRECTED:
            call["direction"] = direction
        getattr(ops, operator)(**call)
        assert not all(same(*pair) for pair in zip(memory, before, strict=True))


@pytest.mark.parametrize(("operator", "argument", "one", "addressed"), CASES)
def test_a_wrong_argument_is_named_and_nothing_has_changed(
    operator: str, argument: str, one: Wrong, addressed: bool
) -> None:
    make, error, named = one
    for direction in (0, 1):
        call, memory = SCENES[operator]()
        if addressed:
            tensors = next(name for name in call if "ptrs" in name and "objects" not in name)
            call[tensors] = addresses(call[tensors])
        if operator in DIRECTED:
            call["direction"] = direction
        call[argument] = given = make()
        watched = [*memory, *(one for one in flat(given) if has_bytes(one))]
        before = [one.detach().clone() for one in watched]
        with pytest.raises(error) as caught:
            getattr(ops, operator)(**call)
        assert type(caught.value) is error
        assert (named or argument) in str(caught.value)
        assert all(same(*pair) for pair in zip(watched, before, strict=True))


NESTED_WRONGLY = {
    "of 4 and 2": (4, lambda k, v: [[*k, v[0]], v[1:]]),
    "of layers": (4, lambda k, v: [[*pair] for pair in zip(k, v, strict=True)]),
    "a tensor beside lists": (4, lambda k, v: [k, *v]),
    "of 1, 1 and 4": (16, lambda k, v: [k[:1], v[:1], [k[1], v[1], k[2], v[2]]]),
    "of planes": (16, lambda k, v: [k, v]),
    "of one": (3, lambda k, _: [[one] for one in k]),
}


@pytest.mark.parametrize(("form", "nest"), NESTED_WRONGLY.values(), ids=NESTED_WRONGLY)
def test_lists_that_are_not_nested_as_the_format_has_them_are_refused(
    form: int, nest: Callable[..., Any]
) -> None:
    """Also where the tensors in them were met before, in a flat list of the same order."""
    if form == 3:
        keys, values = [random(NB, BS, D) for _ in range(NL)], []
    else:
        keys, values = ([random(PBS, NH, HS) for _ in range(NL)] for _ in range(2))
    if form == 16:
        keys, values = ([one.view(NB, BS, NH, HS) for one in some] for some in (keys, values))
    chunk = random(1 if form == 3 else 2, NL, T, D)
    given = nest(keys, values)
    rest = (torch.tensor(SLOTS), torch.device("cpu"), PBS, 1, form, BS)
    for met_before in (False, True):
        if met_before:
            ops.multi_layer_kv_transfer(chunk, flat(given), *rest)
        before = chunk.clone()
        with pytest.raises(ValueError, match="key_value_ptrs"):
            ops.multi_layer_kv_transfer(chunk, given, *rest)
        assert same(chunk, before)


@pytest.mark.parametrize("form", [11, 13])
def test_packed_rows_are_not_split_without_a_head_size(form: int) -> None:
    """LMCache 4463: the first half of a row is not its keys. Unsplit, rows need none."""
    tensors = [random(NB, BS, NH, 2 * HS) for _ in range(NL)]
    rest = (torch.tensor(SLOTS), torch.device("cpu"), PBS, 1, form, BS)
    for given in (addresses(tensors), [one.flatten(2).flatten(0, 1) for one in tensors]):
        chunk = random(2, NL, T, D)
        before = chunk.clone()
        with pytest.raises(ValueError, match="head_size: got 0"):
            ops.multi_layer_kv_transfer(chunk, given, *rest)
        assert same(chunk, before)
        ops.multi_layer_kv_transfer(random(1, NL, T, 2 * D), given, *rest)


def test_no_layers_are_no_cache() -> None:
    rest = (torch.tensor(SLOTS), torch.device("cpu"), PBS, 1)
    for form in (0, 1, 4):
        with pytest.raises(ValueError, match="key_value_ptrs: got 0 tensors"):
            ops.multi_layer_kv_transfer(random(2, 0, T, D), [], *rest, form)
    call, _ = multi_layer_block_kv_transfer()
    call.update(paged_buffer_ptrs_tensor=[], shape_desc=described(nl=0))
    with pytest.raises(ValueError, match="paged_buffer_ptrs_tensor: got 0 tensors"):
        ops.multi_layer_block_kv_transfer(**call, direction=0)


@pytest.mark.parametrize("operator", ["multi_layer_kv_transfer", "load_and_reshape_flash"])
def test_a_gather_into_rows_that_share_bytes_is_refused(operator: str) -> None:
    call, memory = SCENES[operator]()
    call["key_value"] = memory[-1][:, :, :1].expand(2, NL, T, D)
    before = [one.clone() for one in memory]
    if operator in DIRECTED:
        call["direction"] = 1
    with pytest.raises(ValueError, match="key_value"):
        getattr(ops, operator)(**call)
    assert all(same(*pair) for pair in zip(memory, before, strict=True))


def test_a_gather_into_objects_that_share_bytes_is_refused() -> None:
    call, memory = multi_layer_block_kv_transfer()
    call["lmcache_objects_ptrs"] = objects = [memory[-1]] * 3
    before = [one.clone() for one in memory]
    with pytest.raises(
        ValueError, match=r"lmcache_objects_ptrs\[0\] and lmcache_objects_ptrs\[1\]"
    ):
        ops.multi_layer_block_kv_transfer(**call, direction=1)
    call["lmcache_objects_ptrs"] = [one.data_ptr() for one in objects]
    with pytest.raises(ValueError, match="share bytes"):
        ops.multi_layer_block_kv_transfer(**call, direction=1)
    assert all(same(*pair) for pair in zip(memory, before, strict=True))


def flat(given: Any) -> list[Any]:
    if isinstance(given, (list, tuple)):
        return [found for one in given for found in flat(one)]
    return [given]


def has_bytes(one: Any) -> bool:
    plain = isinstance(one, torch.Tensor) and one.layout is torch.strided
    return plain and not one.is_meta and not one.is_quantized


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """By bytes: a NaN is equal to itself."""
    pair = (each.detach().contiguous().view(torch.uint8) for each in (one, other))
    return torch.equal(*pair)
