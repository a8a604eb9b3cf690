"""The U-Net against published counts and shapes, MONAI's DynUNet, and its blocks written out by hand."""

import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from sightline.data.volumes.plan import spec_of
from sightline.errors import UsageError
from sightline.hardware.devices import lay_channels_last
from sightline.models import unet
from sightline.models.unet import DropBlock, Unet, UnetConfig, geometry, make_norm
from sightline.parts import DataSpec

PATCH = (192, 160)
TINY = {"width": 4, "max_filters": 16}
DEAD_HEADS = 4 * (256 + 1) + 4 * (512 + 1)  # the original makes these two and never calls them


def spec(patch=PATCH, channels: int = 4, classes: int = 4, spacing=()) -> DataSpec:
    return DataSpec(tuple(map(str, range(classes))), channels, patch, (), (), spacing=spacing or (1.0,) * len(patch))


def build(patch=PATCH, channels: int = 4, classes: int = 4, spacing=(), **fields) -> Unet:
    torch.manual_seed(0)
    return UnetConfig(**fields).build(spec(patch, channels, classes, spacing))


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# The rule of its form

PATCHES_2D = {
    "01": ((192, 160), 1.0),
    "02": ((320, 256), 1.25),
    "03": ((512, 512), 0.7676),
    "04": ((56, 40), 1.0),
    "05": ((320, 320), 0.62),
    "06": ((512, 512), 0.79),
    "07": ((512, 512), 0.8),
    "08": ((512, 512), 0.8),
    "09": ((512, 512), 0.79),
    "10": ((512, 512), 0.78),
}
PATCHES_3D = {
    "01": ((128, 128, 128), (1.0, 1.0, 1.0)),
    "02": ((80, 192, 160), (1.37, 1.25, 1.25)),
    "03": ((128, 128, 128), (1.0, 0.7676, 0.7676)),
    "04": ((40, 56, 40), (1.0, 1.0, 1.0)),
    "05": ((20, 320, 256), (3.6, 0.62, 0.62)),
    "06": ((80, 192, 160), (1.24, 0.79, 0.79)),
    "07": ((40, 224, 224), (2.5, 0.8, 0.8)),
    "08": ((64, 192, 192), (1.5, 0.8, 0.8)),
    "09": ((64, 192, 160), (1.6, 0.79, 0.79)),
    "10": ((56, 192, 160), (3.0, 0.78, 0.78)),
}


@pytest.mark.parametrize("task", PATCHES_2D)
def test_slices_have_six_levels_and_those_of_task_04_four(task):
    patch, mm = PATCHES_2D[task]
    kernels, strides = geometry(patch, (mm, mm))
    levels = 4 if task == "04" else 6

    assert strides == [(1, 1)] + [(2, 2)] * (levels - 1)
    assert kernels == [(3, 3)] * levels
    with torch.device("meta"):
        model = build(patch, spacing=(mm, mm))
    assert model.filters == [32, 64, 128, 256, 512, 512][:levels]
    assert model.patch == patch


def test_geometry_of_volumes():
    kernels, strides = geometry(*PATCHES_3D["01"])
    assert (kernels, strides) == ([(3, 3, 3)] * 6, [(1, 1, 1)] + [(2, 2, 2)] * 5)
    kernels, strides = geometry(*PATCHES_3D["05"])
    assert kernels == [(1, 3, 3)] * 2 + [(3, 3, 3)] * 4
    assert strides == [(1, 1, 1), (1, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2), (1, 2, 2)]
    assert len(geometry(*PATCHES_3D["04"])[1]) == 4


def test_an_axis_twice_as_coarse_is_halved_with_the_others():
    assert geometry((64, 64), (1.0, 2.0))[1][:2] == [(1, 1), (2, 2)]
    assert geometry((64, 64), (1.0, 2.01))[1][:2] == [(1, 1), (2, 1)]


@pytest.mark.parametrize("dim", [2, 3])
def test_instance_norm_by_itself_is_torchs(dim: int):
    x, norm = torch.randn(2, 4, *(5,) * dim), make_norm("instance", 4, dim)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    torch.testing.assert_close(norm(x), functional.instance_norm(x, weight=norm.weight, bias=norm.bias))


@pytest.mark.parametrize("task", PATCHES_3D)
def test_every_volume_comes_back_at_its_size(task):
    patch, spacing = PATCHES_3D[task]
    with torch.device("meta"):
        model = build(patch, channels=1, classes=3, spacing=spacing, deep_supervision=True)
        outputs = model(torch.empty(1, 1, *patch))
    assert outputs[0].shape == (1, 3, *patch)
    assert model.filters == [32, 64, 128, 256, 320, 320][: len(model.filters)]
    halves = [tuple(s // math.prod(k) for s, *k in zip(patch, *model.strides[: n + 1], strict=True)) for n in range(3)]
    assert [tuple(output.shape[2:]) for output in outputs] == halves


# The network


@pytest.mark.parametrize(
    ("fields", "published"),
    [
        ({}, 20_613_092),
        ({"deep_supervision": True}, 20_613_868),
        ({"deep_supervision": True, "residual": True}, 24_547_124 - DEAD_HEADS),
        ({"deep_supervision": True, "attention": True}, 23_766_062 - DEAD_HEADS),
        ({"norm": "batch"}, 20_613_092),
        ({"norm": "group"}, 20_613_092),
    ],
    ids=str,
)
def test_parameters_are_as_many_as_published(fields, published):
    with torch.device("meta"):
        assert count(build(**fields)) == published


def test_the_bottleneck_of_task_01_has_6x5_cells():
    with torch.device("meta"):
        model, seen = build(), []
        model.encoder[-1].register_forward_hook(lambda module, given, out: seen.append(tuple(out.shape)))
        model(torch.empty(2, 4, *PATCH))
    assert seen == [(2, 512, 6, 5)]


def test_training_gives_three_resolutions_and_evaluation_one():
    with torch.device("meta"):
        model = build(deep_supervision=True)
        image = torch.empty(2, 4, *PATCH)
        trained = model(image)
        evaluated = model.eval()(image)
    assert [tuple(t.shape) for t in trained] == [(2, 4, 192, 160), (2, 4, 96, 80), (2, 4, 48, 40)]
    assert evaluated.shape == (2, 4, 192, 160)


def in_order(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters in the order in which forward uses them: way down, then each level up, then the head."""
    if isinstance(model, Unet):
        parts = [*model.encoder, *model.decoder, model.heads[0]]
    else:
        parts = [model.input_block, *model.downsamples, model.bottleneck, *model.upsamples, model.output_block]
    found = []
    for part in parts:
        convs = [m for m in part.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
        rest = [m for m in part.modules() if isinstance(m, nn.ConvTranspose2d | nn.ConvTranspose3d)]
        norms = [m for m in part.modules() if isinstance(m, nn.modules.instancenorm._InstanceNorm)]
        found += [p for module in (*rest, *convs, *norms) for p in module.parameters()]
    return found


@pytest.mark.parametrize(
    ("patch", "spacing", "width", "most"),
    [((64, 48), (1.0, 1.0), 32, 512), ((8, 32, 32), (3.6, 0.62, 0.62), 8, 20)],
    ids=["2d", "3d"],
)
def test_output_is_that_of_monais_network_with_the_same_weights(patch, spacing, width, most):
    from monai.networks.nets import DynUNet

    ours = build(patch, 2, 3, spacing, width=width, max_filters=most, negative_slope=0.02).eval()
    theirs = DynUNet(
        len(patch),
        2,
        3,
        ours.kernels,
        ours.strides,
        ours.strides[1:],
        filters=ours.filters,
        act_name=("leakyrelu", {"negative_slope": 0.02}),
        trans_bias=True,
    ).eval()
    assert count(ours) == count(theirs)
    with torch.no_grad():
        for mine, other in zip(in_order(ours), in_order(theirs), strict=True):
            mine.normal_(std=mine.numel() ** -0.5) if mine.dim() == 1 else None
            other.copy_(mine)
        image = torch.randn(2, 2, *patch)
        expected = theirs(image)
        torch.testing.assert_close(ours(image), expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.1


def test_monais_network_of_task_01_has_as_many_parameters():
    from monai.networks.nets import DynUNet

    kernels, strides = geometry(PATCH, (1.0, 1.0))
    filters = unet.filters(6, 32, 512)
    with torch.device("meta"):
        theirs = DynUNet(2, 4, 4, kernels, strides, strides[1:], filters=filters, trans_bias=True)
    assert count(theirs) == 20_613_092


def test_weights_start_as_the_original_says():
    model = build((64, 64), classes=3, negative_slope=0.2, deep_supervision=True)
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 10_000:
            fan_in = module.weight[0].numel()
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / (1 + 0.2**2) / fan_in), rel=0.05)
        if isinstance(module, nn.ConvTranspose2d):
            bound = 1 / math.sqrt(module.weight.shape[1] * 4)  # torch's own start: uniform
            assert module.weight.abs().max() <= bound and module.weight.std() > 0.5 * bound
            assert module.bias is not None and module.bias.abs().max() > 0
    assert all(head.bias.abs().max() == 0 and head.weight.std() > 0 for head in model.heads)


# Its blocks, written out


def normed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    conv, norm = layer.conv, layer.norm
    x = functional.conv2d(x, conv.weight, stride=conv.stride, padding=conv.padding)
    mean, var = x.mean((2, 3), keepdim=True), x.var((2, 3), correction=0, keepdim=True)
    return (x - mean) / (var + 1e-5).sqrt() * norm.weight[:, None, None] + norm.bias[:, None, None]


def with_random_norms(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".norm." in name:
                parameter.normal_(1.0, 0.3)
    return model.double()


@pytest.mark.parametrize("channels", [(6, 6), (4, 6)], ids=["as it is", "projected"])
def test_a_residual_block_adds_what_came_in(channels):
    projected = channels[0] != channels[1]
    stride = (2, 2) if projected else (1, 1)
    block = with_random_norms(unet.Block(UnetConfig(negative_slope=0.1), channels, (3, 3), stride, residual=True))
    x = torch.randn(2, channels[0], 8, 12, dtype=torch.float64)

    inner = functional.leaky_relu(normed(block.conv1, x), 0.1)
    added = normed(block.projection, x) if projected else x
    expected = functional.leaky_relu(normed(block.conv2, inner) + added, 0.1)

    torch.testing.assert_close(block(x), expected)
    assert (block.projection is not None) is projected


def test_a_gate_weighs_what_comes_across_and_what_came_up_goes_first():
    up = with_random_norms(unet.Up(UnetConfig(attention=True), (8, 4), (3, 3), (2, 2)))
    x, skip = torch.randn(2, 8, 4, 6, dtype=torch.float64), torch.randn(2, 4, 8, 12, dtype=torch.float64)

    above = functional.conv_transpose2d(x, up.transposed.weight, up.transposed.bias, stride=2)
    both = functional.relu(normed(up.gate.above, above) + normed(up.gate.across, skip))
    gated = skip * torch.sigmoid(normed(up.gate.share, both))
    expected = up.block(torch.cat([above, gated], dim=1))

    torch.testing.assert_close(up(x, skip), expected)
    assert up.gate.above.conv.weight.shape == (2, 4, 3, 3) and up.gate.share.conv.weight.shape == (1, 2, 3, 3)


# DropBlock


def dropping(steps: int) -> DropBlock:
    layer = DropBlock()
    layer.steps.fill_(steps)
    return layer


def chance(share: float, space: tuple[int, ...]) -> float:
    """Return the chance that a voxel is dropped: at least one centre is within reach, of which borders have fewer."""
    ones = torch.ones(1, 1, *space)
    count = functional.conv2d if len(space) == 2 else functional.conv3d
    reach = count(ones, torch.ones(1, 1, *(5,) * len(space)), padding=2)
    return (1 - (1 - share / 5 ** len(space)) ** reach).mean().item()


@pytest.mark.parametrize("shape", [(1000, 2, 24, 40), (200, 2, 12, 20, 24)], ids=["2d", "3d"])
def test_blocks_of_five_are_dropped_in_all_channels_and_the_rest_is_scaled(shape):
    torch.manual_seed(0)
    out = dropping(20_000)(torch.ones(shape))  # the share stays 0.1 after the ramp
    dropped = out == 0

    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert dropped.float().mean().item() == pytest.approx(chance(0.1, shape[2:]), rel=0.05)
    assert len(out[out != 0].unique()) == 1
    assert out.double().mean().item() == pytest.approx(1.0, abs=1e-6)
    # Every dropped voxel lies in a whole dropped block: where one fits, borders aside, is grown to it again.
    pool = functional.max_pool2d if len(shape) == 4 else functional.max_pool3d
    mask = dropped[:, :1].float()
    fits = 1 - pool(functional.pad(1 - mask, (2, 2) * (len(shape) - 2)), 5, 1)
    assert torch.equal(pool(fits, 5, 1, 2), mask)


def test_the_share_of_dropped_blocks_grows_over_ten_thousand_passes():
    x = torch.ones(1000, 1, 30, 30)
    torch.manual_seed(0)
    for steps in (0, 2_500, 5_000, 10_000, 30_000):
        layer = dropping(steps)
        share = (layer(x) == 0).float().mean().item()
        assert share == pytest.approx(chance(0.1 * min(1, steps / 10_000), (30, 30)), rel=0.06)
        assert layer.steps.item() == steps + 1
    layer = dropping(10_000).eval()
    assert torch.equal(layer(x), x) and layer.steps.item() == 10_000


def test_drop_block_sits_in_the_three_deepest_levels_and_its_counters_in_checkpoints():
    model = build(drop_block=True, residual=True, **TINY)
    found = {name.split(".")[1] for name, m in model.named_modules() if isinstance(m, DropBlock)}
    assert found == {"3", "4", "5"} and not any("decoder" in n for n, m in model.named_modules() if ".drop" in n)
    counters = {name: t for name, t in model.state_dict().items() if name.endswith("drop.steps")}
    assert len(counters) == 9  # two convolutions and a projection each
    image = torch.randn(2, 4, 64, 64)
    first = model(image)
    assert all(t.item() == 1 for t in counters.values())
    for t in counters.values():
        t.fill_(8_000)
    torch.manual_seed(5)
    second = model(image)
    for t in counters.values():
        t.fill_(8_000)
    torch.manual_seed(5)
    assert torch.equal(model(image), second) and not torch.equal(first, second)


# Options

OPTIONS = [
    {"norm": "batch"},
    {"norm": "group"},
    {"norm": "group", "attention": True, "residual": True},
    {"residual": True, "negative_slope": 0.2},
    {"attention": True},
    {"drop_block": True, "norm": "batch"},
    {"deep_supervision": True, "aux_heads": 1},
]


@pytest.mark.parametrize("patch", [(32, 48), (32, 32, 32)], ids=["2d", "3d"])
@pytest.mark.parametrize("fields", OPTIONS, ids=str)
def test_every_option_learns_with_every_parameter(fields, patch):
    model = build(patch, 2, 3, **fields, **TINY)
    for layer in model.modules():
        if isinstance(layer, DropBlock):
            layer.steps.fill_(10_000)
    outputs = model(torch.randn(2, 2, *patch))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum((output**2).mean() for output in outputs).backward()
    assert len(outputs) == (2 if "aux_heads" in fields else 1)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


def test_group_norm_has_32_groups_where_channels_allow():
    model = build(norm="group", attention=True, width=48)
    groups = {m.num_channels: m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)}
    assert (groups[96], groups[48], groups[24], groups[1]) == (32, 16, 8, 1)


# Dynamo finds what breaks a graph; what AOTAutograd makes of it costs as much again.
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager_default_partitioner", marks=pytest.mark.slow)])
def test_it_is_one_graph_with_the_same_numbers(backend):
    parts = {"deep_supervision": True, "aux_heads": 1, "residual": True, "attention": True, "drop_block": True}
    model = build((16, 16), 2, 3, **parts, **TINY)
    image = torch.randn(2, 2, 16, 16)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    for steps in (0, 9_000):
        results = []
        for network in (model, compiled):
            for layer in model.modules():
                if isinstance(layer, DropBlock):
                    layer.steps.fill_(steps)
            torch.manual_seed(1)
            results.append(network(image))
        torch.testing.assert_close(results[0], results[1])
    assert {m.steps.item() for m in model.modules() if isinstance(m, DropBlock)} == {9_001}


def test_it_learns_in_bf16_and_channels_last():
    model = build((32, 32), 2, 3, deep_supervision=True, aux_heads=1, **TINY).to(memory_format=torch.channels_last)
    image = torch.randn(2, 2, 32, 32)
    expected = [output.detach() for output in model(image)]
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(image.to(memory_format=torch.channels_last))
    sum(output.float().square().mean() for output in outputs).backward()
    for output, reference in zip(outputs, expected, strict=True):
        assert output.dtype == torch.bfloat16
        assert (output.float() - reference).norm() < 0.05 * reference.norm()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_volumes_have_their_channels_last_too():
    model = build((16, 16, 16), 2, 3, **TINY).eval()
    image = torch.randn(1, 2, 16, 16, 16)
    with torch.no_grad():
        expected = model(image)
        lay_channels_last(model)
        found = model(image.to(memory_format=torch.channels_last_3d))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert all(p.is_contiguous(memory_format=torch.channels_last_3d) for p in model.parameters() if p.dim() == 5)


# What it refuses, and what it tells


@pytest.mark.parametrize(("size", "spacing"), [((56, 40), ()), ((32, 32, 16), (1.0, 1.0, 3.0))])
def test_the_shapes_that_norms_get_are_known_ahead(monkeypatch, size, spacing):
    seen = []
    monkeypatch.setattr(unet.InstanceNorm, "forward", lambda norm, x, slope=1.0: seen.append(tuple(x.shape)) or x)
    model = unet.build(UnetConfig(width=4), DataSpec(("a", "b"), 1, size, (), (), spacing=spacing))
    model(torch.zeros(2, 1, *size))
    assert set(seen) == set(model.norm_shapes(2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm": "layer"}, "model.norm='layer' is unknown; use one of instance, batch, group"),
        ({"negative_slope": -0.1}, "model.negative_slope=-0.1"),
        ({"negative_slope": math.nan}, "model.negative_slope=nan"),
        ({"width": 0}, "model.width=0"),
        ({"aux_heads": 0}, "model.aux_heads=0"),
        ({"width": 32, "max_filters": 16}, "model.max_filters=16 must not be below model.width=32"),
        ({"attention": True, "width": 1}, "model.width=1 is too small"),
    ],
)
def test_bad_fields_are_refused_with_their_values(fields, message):
    with pytest.raises(UsageError) as caught:
        UnetConfig(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("patch", "fields", "message"),
    [
        ((50, 40), {}, "the patch 50x40 cannot be halved .* multiples of 8x8, e.g. 56x40"),
        ((7, 6), {}, "the patch 7x6 is too small"),
        ((64,), {}, "got a patch of 64; give 2 or 3 numbers"),
        ((16, 16), {"deep_supervision": True}, "model.aux_heads=2: the patch 16x16 makes 3 levels, of which 1 "),
    ],
)
def test_patches_that_do_not_fit_are_refused(patch, fields, message):
    with pytest.raises(UsageError, match=message):
        build(patch, **TINY, **fields)


def test_a_patch_that_an_error_proposes_is_the_next_one_that_fits():
    refused = {}
    for side in range(8, 140):
        try:
            with torch.device("meta"):
                build((side, 64), 1, 2, width=1)
        except UsageError as error:
            said = re.fullmatch(r".* multiples of (\d+)x(\d+), e.g. (\d+)x(\d+)", str(error))
            refused[side] = tuple(map(int, said.groups()))
    # A side is halved while it has 8 or more, 5 times at most.
    assert sorted(refused) == [side for side in range(8, 140) if side % 2 ** min(5, int(math.log2(side / 4)))]
    for side, (multiple, other, proposed, kept) in refused.items():
        assert proposed % multiple == 0 and side < proposed < side + multiple
        assert kept == 64 and kept % other == 0
    for proposed in {proposed for _, _, proposed, _ in refused.values()}:
        with torch.device("meta"):
            assert build((proposed, 64), 1, 2, width=1).patch == (proposed, 64)
    *_, proposed, kept = refused[50]
    image = torch.zeros(1, 1, proposed, kept)
    assert build((proposed, kept), 1, 2, width=1)(image).shape == (1, 2, proposed, kept)


def test_a_spacing_of_other_axes_is_refused_and_none_means_equal():
    with pytest.raises(UsageError, match="the patch 32x32 has 2 axes but its spacing 3"):
        build((32, 32), spacing=(1.0, 1.0, 1.0), **TINY)
    plain = DataSpec(("a", "b"), 3, (32, 32), (0.5,) * 3, (0.5,) * 3)
    assert UnetConfig(**TINY).build(plain).strides == [(1, 1), (2, 2), (2, 2), (2, 2)]


def test_a_start_tells_filters_kernels_and_strides():
    config = UnetConfig(**TINY)
    assert config.start_from(config.build(spec((20, 32, 32), spacing=(3.6, 0.62, 0.62)))) == (
        "U-Net for patches of 20x32x32: 5 levels, filters 4 8 16 16 16, kernels 1x3x3 1x3x3 3x3x3 3x3x3 3x3x3, "
        "strides 1x1x1 1x2x2 1x2x2 2x2x2 2x1x1"
    )


# As configs.py of NVIDIA's nnU-Net has them: mean, standard deviation and the ends of the clip.
CT = {
    "03": (99.4, 39.36, -17, 201),
    "06": (-158.58, 324.7, -1024, 325),
    "07": (77.9, 75.4, -96, 215),
    "08": (104.37, 52.62, -3, 243),
    "09": (99.29, 39.47, -41, 176),
    "10": (62.18, 32.65, -30, 165.82),
}


@pytest.mark.parametrize("task", PATCHES_2D)
def test_tasks_have_the_patches_and_the_numbers_of_the_original(task: str):
    flat, deep = (spec_of(task, dim) for dim in (2, 3))
    patch, mm = PATCHES_2D[task]
    assert (flat.size, flat.spacing) == (patch, (mm, mm)) and (deep.size, deep.spacing) == PATCHES_3D[task]
    for each in (flat, deep):
        if task in CT:
            mean, std, low, high = CT[task]
            assert (each.mean, each.std, each.clip) == ((mean,), (std,), (low, high))
        else:
            assert (each.mean, each.std, each.clip) == ((), (), ())
