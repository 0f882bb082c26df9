"""The Muon recipe: its sizes, its optimiser against the formula, and its training against stock layers in float64."""

import pytest
import torch
import torch.nn.functional as F
from conftest import Recorder
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from large_batch_cifar_10_fast.images.sources import Images
from large_batch_cifar_10_fast.images.synthetic import draw_shapes
from large_batch_cifar_10_fast.recipes.muon import Muon2024, MuonRecipe
from large_batch_cifar_10_fast.request.command_line import read_request
from large_batch_cifar_10_fast.results.clock import Clock
from large_batch_cifar_10_fast.settings.settings import Refusal, Settings
from large_batch_cifar_10_fast.train import make_learner, prepare, train_once
from large_batch_cifar_10_fast.training.augmentation import CropAndAlternate, Shaded, draw_independently, scaled_down
from large_batch_cifar_10_fast.training.compiling import gradients, noise
from large_batch_cifar_10_fast.training.muon import Muon, orthogonal, orthogonal_all
from large_batch_cifar_10_fast.training.networks import enter, frozen_weights, make_network, reset, weight_dtype, work
from large_batch_cifar_10_fast.training.optimizers import PulledToAverage
from large_batch_cifar_10_fast.training.recipe import Stage, stage_of
from large_batch_cifar_10_fast.training.shards import deal_epoch
from large_batch_cifar_10_fast.training.views import ONE_VIEW, SIX_VIEWS, AgainWhereUnsure, Averaged
from large_batch_cifar_10_fast.training.world import World

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU, 1)
STARTED, LATER = Stage(1, 32), Stage(4, 32, ("whitening.bias",))


def test_parameters_and_work_are_the_published_ones():
    network = Muon2024().network()
    assert sum(weight.numel() for weight in network.parameters() if weight.requires_grad) == 1_971_352
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        Muon2024().network().eval()(torch.empty(1, 3, 32, 32))
    assert counter.get_total_flops() == pytest.approx(0.236e9, rel=2e-3)
    assert work(Muon2024(), 50_000) == pytest.approx(0.278e15, rel=0.01)
    assert work(MuonRecipe(), 50_000) < 0.20e15


def test_stages_begin_where_the_resolution_changes_or_the_bias_comes_to_rest():
    assert Muon2024().stages == (STARTED, LATER)
    rest = ("whitening.bias",)
    recipe = MuonRecipe(epochs=4, pixels="24,24,24,28,28,32", whitening_epochs=1)
    assert recipe.stages == (Stage(1, 24), Stage(2, 24, rest), Stage(3, 28, rest), Stage(4, 32, rest))
    assert [stage_of(recipe, epoch).resolution for epoch in (0, 1, 2, 3, 4, 9)] == [24, 24, 24, 28, 32, 32]
    assert MuonRecipe(epochs=3, pixels="32", whitening_epochs=0).stages == (Stage(1, 32, rest),)


def test_what_rests_has_no_gradient_until_a_reset_and_filters_stay():
    recipe = Muon2024(width=8, batch_size=20)
    network = make_network(recipe, seed=0)
    recipe.whiten(network, torch.randn(20, 32, 32, 3))
    filters = network.whitening.weight.clone()
    enter(network, LATER)
    network(torch.randn(20, 3, 32, 32)).sum().backward()
    assert network.whitening.bias.grad is None
    assert network.groups[0][0].weight.grad is not None
    with torch.no_grad():
        network.whitening.bias += 1
    reset(network, recipe, seed=3)
    assert network.whitening.bias.requires_grad
    torch.testing.assert_close(network.whitening.bias, make_network(recipe, seed=3).whitening.bias)
    assert torch.equal(network.whitening.weight, filters)
    assert frozen_weights(network).keys() == {"whitening.weight"}


def test_the_smallest_images_leave_a_pixel_to_the_last_layer():
    network = MuonRecipe(width=2, batch_size=2, pixels="9").network()
    assert network(torch.randn(2, 3, 9, 9)).shape == (2, 10)


def test_whitening_sees_every_patch_and_its_negative():
    recipe, images = Muon2024(width=8), torch.randn(50, 32, 32, 3)
    recipe.whiten(network := recipe.network(), images)
    network.whitening.bias.data.zero_()
    outputs = network.whitening(images.permute(0, 3, 1, 2))
    assert outputs.shape == (50, 24, 31, 31)
    torch.testing.assert_close(outputs[:, 12:], -outputs[:, :12])
    assert outputs.square().mean((0, 2, 3)).sub(1).abs().max() < 0.01, "of variance 1, uncorrelated noise that it is"


def test_filters_begin_as_the_identity_and_the_head_with_deviation_one():
    network = make_network(Muon2024(), seed=0)
    x = torch.randn(2, 24, 8, 8)
    torch.testing.assert_close(network.groups[0][0](x)[:, :24], x)
    assert network.groups[0][0](x).shape[1] == 64
    assert network.linear.weight.std().item() == pytest.approx(1)


@pytest.mark.parametrize("shape", [(8, 20), (3, 8, 20), (20, 8)])
def test_orthogonal_keeps_directions_and_levels_their_sizes(shape):
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    made = orthogonal(matrix)
    levelled = u.mT @ made @ v.mT
    sizes = levelled.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(levelled, torch.diag_embed(sizes), rtol=0, atol=1e-9)
    expected = s / s.square().sum(-1, keepdim=True).sqrt()
    for _ in range(3):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    torch.testing.assert_close(sizes, expected)
    assert 0.5 < sizes.min() < sizes.max() < 1.3
    torch.testing.assert_close(orthogonal(1000 * matrix), made)


def test_muon_moves_filters_as_its_formula_says_each_by_itself():
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 4, 3, 3), (5, 2, 3, 3), (6, 4, 3, 3)]
    weights = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
    resting = nn.Parameter(torch.ones(2, 2, 3, 3))
    optimizer = Muon([{"params": [*weights, resting]}], momentum=0.6, rescale_every=2, world=ALONE)
    optimizer.param_groups[0]["lr"] = 0.24
    expected = [weight.detach().clone() for weight in weights]
    momenta = [torch.zeros_like(weight) for weight in expected]
    for step in range(3):
        for i, weight in enumerate(weights):
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            momenta[i] = 0.6 * momenta[i] + weight.grad
            direction = (weight.grad + 0.6 * momenta[i]).reshape(len(weight), -1)
            x = direction / direction.square().sum().sqrt()
            for _ in range(3):
                a = x @ x.T
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            if step in (0, 2):
                expected[i] = expected[i] * len(weight) ** 0.5 / expected[i].square().sum().sqrt()
            expected[i] = expected[i] - 0.24 * x.view(weight.shape)
        optimizer.step()
        for weight, value in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight.detach(), value, rtol=1e-6, atol=1e-6)
    assert resting.eq(1).all()


def test_each_process_makes_its_own_share_of_the_matrices_orthogonal(monkeypatch):
    monkeypatch.setattr(World, "all_reduce", lambda self, tensor: tensor)
    shapes = [(6, 4, 3, 3), (5, 2, 3, 3), (6, 4, 3, 3), (7, 7, 3, 3)]
    directions = [torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) for shape in shapes]
    shares = [orthogonal_all(directions, World(rank, 3, CPU, 3)) for rank in range(3)]
    makers = [[bool(share[i].any()) for share in shares] for i in range(4)]
    assert [sum(made) for made in makers] == [1, 1, 1, 1], "each matrix by one process"
    assert makers[3] == [True, False, False], "the largest first"
    for direction, *made in zip(directions, *shares, strict=True):
        torch.testing.assert_close(sum(made).flatten(1), orthogonal(direction.flatten(1)))


def test_muon_multiplies_in_the_precision_of_autocast():
    matrix = torch.randn(8, 20)
    with torch.autocast("cpu", torch.bfloat16):
        half = orthogonal(matrix)
    assert half.dtype == torch.float32
    assert 1e-4 < (half - orthogonal(matrix)).abs().max() < 0.05


def test_weights_are_pulled_to_their_average_every_few_steps_once_it_begins():
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer, seen = PulledToAverage([{"params": [weight]}], decay=0.7, every=2), []
    for step in range(6):
        optimizer.param_groups[0]["averaging"] = float(step >= 1)
        with torch.no_grad():
            weight += 1
        optimizer.step()
        seen.append(weight.item())
    # begins with 3; two steps later it is 0.7 * 3 + 0.3 * 5; and again
    assert seen == pytest.approx([2, 3, 4, 3.6, 4.6, 0.7 * 3.6 + 0.3 * 5.6])


def test_a_tail_has_a_constant_small_rate_and_averages_what_is_trained():
    recipe = MuonRecipe(tail_epochs=0.5)
    network = recipe.network()
    muon, sgd, average = recipe.optimizers(network, ALONE)
    falling = muon.param_groups[0]["schedules"]["lr"]
    known = {0.04: 0.24, 3.79: 0.24 * (1 - 0.95 / 2), 7.54: 0.24 * 0.05, 8: 0.24 * 0.05}
    assert {epoch: falling(epoch) for epoch in known} == pytest.approx(known)
    (group,) = average.param_groups
    assert [group["schedules"]["averaging"](epoch) for epoch in (7.46, 7.5, 8)] == [0, 1, 1]
    averaged = {id(weight) for weight in group["params"]}
    trained = {id(weight) for o in (muon, sgd) for g in o.param_groups for weight in g["params"]}
    assert averaged == trained - {id(network.whitening.bias)}
    assert len(MuonRecipe(tail_epochs=0).optimizers(network, ALONE)) == 2


def test_flips_alternate_from_epoch_to_epoch_and_differ_from_run_to_run():
    rows, augmentation = torch.arange(200), CropAndAlternate(padding=2, deal=draw_independently)

    def flips(seed, worker, epoch):
        order, crops, mirrored = deal_epoch(rows, augmentation, seed, worker, epoch)
        assert crops.min() == 0
        assert crops.max() == 24
        return mirrored[order.argsort()]

    first = flips(1, 0, 1)
    assert 60 < first.sum() < 140
    assert torch.equal(flips(1, 0, 2), 1 - first)
    assert torch.equal(flips(1, 0, 3), first)
    for other in (flips(2, 0, 1), flips(1, 1, 1)):
        assert 60 < (other == first).sum() < 140


def test_shades_change_contrast_and_brightness_of_each_image():
    augmentation = Shaded(CropAndAlternate(2, draw_independently), brightness=0.14, contrast=0.13)
    images, generator = torch.randn(400, 32, 32, 3), torch.Generator()
    _, flips, factors, offsets = augmentation.choose(400, generator, torch.Generator(), 1)
    assert 0.87 <= factors.min() < 0.88 < 1.12 < factors.max() <= 1.13
    assert -0.14 <= offsets.min() < -0.13 < 0.13 < offsets.max() <= 0.14
    batch = augmentation(images, torch.arange(400), torch.full((400,), 12), torch.zeros_like(flips), factors, offsets)
    torch.testing.assert_close(batch[7], images[7].permute(2, 0, 1) * factors[7] + offsets[7])
    assert batch.is_contiguous(memory_format=torch.channels_last)


def test_images_are_scaled_down_bilinearly_and_whole():
    ramp = torch.linspace(0, 31, 32, dtype=torch.float64).expand(1, 3, 32, 32).contiguous()
    small = scaled_down(ramp.to(memory_format=torch.channels_last), 24)
    torch.testing.assert_close(small[0, 0, 0], (torch.arange(24, dtype=torch.float64) + 0.5) * 32 / 24 - 0.5)
    assert small.is_contiguous(memory_format=torch.channels_last)
    assert scaled_down(ramp, 32) is ramp


def test_six_views_are_weighted_and_shifted_by_a_pixel():
    image = torch.arange(16.0).view(1, 1, 4, 4)
    seen = {}

    def network(view):
        seen[tuple(view[0, 0, 0].tolist())] = view[0, 0, :, 0].tolist()
        return view[0, 0, 0, :1]

    logits = SIX_VIEWS(network, image.permute(0, 2, 3, 1), ALONE)
    assert seen == {
        (0, 1, 2, 3): [0, 4, 8, 12],
        (3, 2, 1, 0): [3, 7, 11, 15],
        (5, 6, 7, 6): [5, 9, 13, 9],  # up and left: reflected at the far ends
        (6, 7, 6, 5): [6, 10, 14, 10],
        (5, 4, 5, 6): [5, 1, 5, 9],
        (6, 5, 4, 5): [6, 2, 6, 10],
    }
    assert logits.item() == (0 + 3) / 4 + (5 + 6 + 5 + 6) / 8


def test_a_second_look_at_the_unsure_quarter_of_all_processes_images():
    """Images of one grey each, of which the network is the surer the brighter they are."""
    greys = torch.tensor([5.0, 1, 7, 2, 8, 3, 6, 4])
    looked = []

    def network(batch):
        grey = batch[:, 0, 0, 0]
        return torch.stack([grey, torch.zeros_like(grey)], 1)

    def noted(batch):
        looked.extend(batch[:, 0, 0, 0].tolist())
        return -batch

    again = AgainWhereUnsure(ONE_VIEW, Averaged({noted: 1.0}), share=1 / 4)
    images = greys.view(8, 1, 1, 1).expand(8, 32, 32, 3)
    assert again(network, images, ALONE)[:, 0].tolist() == [5, -1, 7, -2, 8, 3, 6, 4]
    assert looked == [1, 2]

    class OneOfTwo:
        """Of two processes one, which has every other image."""

        def __init__(self, rank):
            self.rank, self.world_size = rank, 2

        def all_reduce(self, tensor):
            if tensor.ndim == 0:
                return tensor + 4
            others = images[1 - self.rank :: 2].permute(0, 3, 1, 2)
            tensor[1 - self.rank :: 2] = network(others).softmax(1).amax(1)
            return tensor

    assert again(network, images[::2], OneOfTwo(0))[:, 0].tolist() == [5, 7, 8, 6]
    assert again(network, images[1::2], OneOfTwo(1))[:, 0].tolist() == [-1, -2, 3, 4]


class StockNetwork(nn.Module):
    """Of stock layers, made in the order of ours, so that weights can be copied one by one."""

    def __init__(self, w, momentum):
        super().__init__()
        self.whitening = nn.Conv2d(3, 24, 2)
        shapes = [(24, w), (w, w), (w, 4 * w), (4 * w, 4 * w), (4 * w, 4 * w), (4 * w, 4 * w)]
        self.convolutions = nn.ModuleList(nn.Conv2d(*shape, 3, padding=1, bias=False) for shape in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(out, eps=1e-12, momentum=momentum) for _, out in shapes)
        self.linear = nn.Linear(4 * w, 10, bias=False)
        for norm in self.norms:
            norm.weight.requires_grad_(False)

    def forward(self, x):
        x = F.gelu(self.whitening(x))
        for place, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = convolution(x)
            x = F.max_pool2d(x, 2) if place % 2 == 0 else x
            x = F.gelu(norm(x))
        return self.linear(x.amax((2, 3))) / 256


def _muon(w, g, state, rate):
    state[:] = 0.6 * state + g
    direction = (g + 0.6 * state).reshape(len(w), -1)
    x = direction / direction.norm()
    for _ in range(3):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return w * len(w) ** 0.5 / w.norm() - rate * x.view(w.shape)


def _sgd(w, g, state, rate, decay):
    g = g + decay * w
    state[:] = 0.85 * state + g
    return w - rate * (g + 0.85 * state)


@pytest.mark.parametrize("workers", [1, 2])
def test_training_and_evaluation_equal_stock_layers_to_nine_digits(workers):
    """Four epochs, at two resolutions, the bias of the whitening at rest after the first; rates for summed losses."""
    batch, seed, epochs, steps = 12 // workers, 5, 4, 3
    total = 12 * steps + workers  # what is left of a shard waits
    recipe = MuonRecipe(epochs=epochs, batch_size=batch, workers=workers, width=4, pixels="24,32")
    world = World(0, 1, CPU, workers)
    learner = make_learner(Settings(precision="fp64", seed=seed), recipe, world)
    data = prepare(Images("shapes", *draw_shapes(total, 40)), learner, Clock(world.synchronize))
    reference, names = StockNetwork(4, 0.4).double(), [name for name, _ in learner.network.named_parameters()]
    ours = dict(learner.network.named_parameters())
    assert names[:2] == ["whitening.weight", "whitening.bias"]
    assert names[-1] == "linear.weight"
    biases = [name for name in names if name.endswith("bias") and name != "whitening.bias"]
    filters = [name for name in names if name.startswith("groups") and name.endswith("weight")]
    theirs = {"whitening.weight": reference.whitening.weight, "whitening.bias": reference.whitening.bias}
    theirs |= {name: c.weight for name, c in zip(filters, reference.convolutions, strict=True)}
    theirs |= {name: n.bias for name, n in zip(biases, reference.norms, strict=True)}
    theirs |= {"linear.weight": reference.linear.weight}
    reset(learner.network, recipe, seed)
    with torch.no_grad():
        for name, weight in theirs.items():
            weight.copy_(ours[name])
    trained = []

    class Log(Recorder):
        def epoch(self, clock, validation):
            trained.append(ours["whitening.bias"].requires_grad)
            super().epoch(clock, validation)

    train_once(0, learner, data, Clock(world.synchronize), log := Log())
    assert trained == [True, False, False, False], "its rate is 0 then, too: this is the work saved"

    state = {name: torch.zeros_like(weight) for name, weight in theirs.items()}
    decay, step = 2e-6 * 12, 0
    for epoch in range(1, epochs + 1):
        reference.train()
        for ((x, y),) in data.train.epoch(seed, epoch):
            assert x.shape[-1] == (24 if epoch <= 2 else 32)
            gradients = dict.fromkeys(theirs, 0.0)
            for worker in range(workers):
                mine = slice(worker * batch, (worker + 1) * batch)
                kept = {k: v.clone() for k, v in reference.state_dict().items() if "running" in k or "tracked" in k}
                loss = F.cross_entropy(reference(x[mine]), y[mine], label_smoothing=0.2, reduction="sum")
                reference.zero_grad()
                loss.backward()
                if worker:
                    reference.load_state_dict(kept, strict=False)  # worker 0's statistics alone
                gradients = {name: gradients[name] + weight.grad for name, weight in theirs.items()}
            step += 1
            now = step / steps - 12 / 50_000  # epochs; of the true data set the first step would end here
            left, left_early = 1 - now / epochs, 1 - now
            with torch.no_grad():
                for name, w in theirs.items():
                    g, s = gradients[name], state[name]
                    if name in filters:
                        w.copy_(_muon(w, g, s, 0.24 * left))
                    elif name in biases:
                        w.copy_(_sgd(w, g, s, 0.053 * left, decay / 0.053))
                    elif name == "linear.weight":
                        w.copy_(_sgd(w, g, s, 0.67 * left, decay / 0.67))
                    elif name == "whitening.bias" and epoch == 1:
                        w.copy_(_sgd(w, g, s, 0.053 * left_early, decay / 0.053))
        with torch.no_grad():
            images = data.test[0].permute(0, 3, 1, 2)
            padded = F.pad(images, (1, 1, 1, 1), "reflect")
            shifted = [padded[:, :, :32, :32], padded[:, :, 2:, 2:]]
            reference.eval()
            logits = sum(
                (reference(view) + reference(view.flip(3))) * weight
                for view, weight in zip([images, *shifted], [0.25, 0.125, 0.125], strict=True)
            )
        assert log.validations[epoch - 1].correct == (logits.argmax(1) == data.test[1]).sum()
        expected = F.cross_entropy(logits, data.test[1], label_smoothing=0.2).item()
        assert log.validations[epoch - 1].loss == pytest.approx(expected, rel=1e-9)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_in_half_precision_gradients_point_where_those_of_float64_do(precision):
    """Float32 weights and sums over the batch: nothing is too small for fp16, without a scale of the loss."""
    recipe, found = MuonRecipe(width=8, batch_size=20), {}
    for name in (precision, "fp64"):
        learner = make_learner(Settings(precision=name, seed=3), recipe, ALONE)
        batch = noise(20, 24, weight_dtype(recipe, name), ALONE)
        found[name] = gradients(learner.network, learner.forward, recipe, batch, name)
    for name, expected in found["fp64"].items():
        assert found[precision][name].dtype == torch.float32
        cosine = F.cosine_similarity(found[precision][name].double().flatten(), expected.flatten(), dim=0)
        assert 0.8 < cosine < 1 - 1e-9, name


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--pixels", "24x2"], {}, "--pixels 24x2 is no list of whole numbers, like 24,24,28,32"),
        (["--pixels", "24,40"], {}, "--pixels 24,40: sizes must lie in 9 to 32"),
        (["--pixels", "8"], {}, "--pixels 8: sizes must lie in 9 to 32, or three poolings leave nothing"),
        (["--whitening_epochs", "9"], {}, "--whitening_epochs 9 must lie in 0 to 8: a run has 8 epochs"),
        (["--label_smoothing", "1.5"], {}, "--label_smoothing 1.5 must lie in 0 to 1: it is a share"),
        (["--head_rate", "0"], {}, "--head_rate 0.0 must be greater than 0"),
        ([], {"WORKERS": "3"}, "WORKERS=3 does not divide 2000 images: choose --batch_size"),
        (["--views", "three"], {}, "invalid choice: 'three'"),
    ],
)
def test_what_the_recipe_cannot_do_is_refused(arguments, variables, message):
    with pytest.raises(Refusal, match=message):
        read_request(["--recipe", "muon", *arguments], variables)


def test_a_step_of_2000_images_is_shared_out_over_the_workers():
    _, recipe = read_request(["--recipe", "muon"], {"WORKERS": "8"})
    assert (recipe.workers, recipe.batch_size) == (8, 250)
