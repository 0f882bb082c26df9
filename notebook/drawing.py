"""The pictures of why_it_is_fast.ipynb: each function draws one, from what its cell computed."""

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F

BLACK = "black"
BLUE = "#0072B2"  # differs from black in grey, too

plt.rcParams.update({"figure.figsize": (7, 2.8), "figure.dpi": 120, "figure.constrained_layout.use": True})
plt.rcParams.update({"axes.titleweight": "bold", "axes.titlesize": 10, "axes.titlelocation": "left"})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})


def draw_seconds(systems):
    """Draw seconds of systems, (name, year, seconds), from top to bottom. Ours are blue."""
    figure, axes = plt.subplots(figsize=(7, 3))
    for place, (name, _, seconds) in enumerate(systems):
        color = BLUE if "ours" in name else BLACK
        axes.hlines(place, 0.1, seconds, color=color, lw=1)
        axes.plot(seconds, place, "o", color=color)
        axes.annotate(f"{seconds:.3g} s", (seconds, place), (8, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(systems)), [f"{year}: {name}" for name, year, _ in systems])
    axes.invert_yaxis()
    axes.set(xscale="log", xlim=(0.1, 2000), xlabel="seconds of training, logarithmic")
    figure.suptitle("500 times faster in eight years: less work on better GPUs", weight="bold", size=10)
    plt.show()


def draw_work(recipes):
    """Draw the MFLOP of each part of networks: (name, names of parts, output sizes, work)."""
    figure, panels = plt.subplots(1, len(recipes), figsize=(7, 3))
    for axes, (recipe, parts, sizes, work) in zip(panels, recipes, strict=True):
        bars = axes.barh(parts, work, color=BLUE)
        axes.bar_label(bars, ["x".join(map(str, size)) for size in sizes], padding=3)
        axes.set(xlabel="MFLOP of an image, forward", xlim=(0, 1.6 * max(work)))
        axes.invert_yaxis()
        axes.set_title(f"{recipe}: {sum(work):.0f} MFLOP")
    figure.suptitle("More channels, fewer positions: the last layers cost no more", weight="bold", size=10)
    plt.show()


def draw_whitening(filters, covariance, whitened):
    """Draw filters [27, 3, 3, 3], and the covariance of patches before and after."""
    figure, (left, middle, right) = plt.subplots(1, 3, width_ratios=[1.7, 1, 1])
    pictures = filters / filters.abs().amax((1, 2, 3), keepdim=True) / 2 + 0.5  # grey is 0
    tiles = F.pad(pictures, (0, 1, 0, 1), value=1).unflatten(0, (3, 9))
    left.imshow(tiles.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1))
    left.axis("off")
    left.set_title("27 filters, of strong directions first")
    middle.imshow(covariance, cmap="gray", vmin=0, vmax=1)
    middle.set_title("9 pixels of 3\ncolors: alike")
    shade = right.imshow(whitened, cmap="gray", vmin=0, vmax=1)
    right.set_title("filtered: not")
    for axes in (middle, right):
        axes.set(xticks=[], yticks=[])
    figure.colorbar(shade, ax=[middle, right], shrink=0.7, label="covariance")
    plt.show()


def draw_crops(independent, balanced, seen, sides):
    """Draw how often each crop occurs, and an image as it is seen in each epoch, by the way its side is chosen."""
    figure = plt.figure(figsize=(7, 2.8))
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.5])
    axes = left.subplots()
    axes.plot(independent.sort().values, "--", color=BLUE, label="independent")
    axes.plot(balanced.sort().values, color=BLACK, label="balanced")
    axes.set(xlabel="81 crops, rarest first", ylabel="images of a worker's epoch", ylim=(0, None))
    axes.set_title("Each crop equally often")
    axes.legend(loc="lower right")
    right.suptitle("Both sides of an image in two epochs", x=0.08, ha="left", weight="bold", size=10)
    rows = right.subplots(2, len(seen["alternating"]))
    for row, (name, flips) in zip(rows, sides.items(), strict=True):
        for epoch, axes in enumerate(row):
            axes.imshow(seen[name][epoch].permute(1, 2, 0))
            axes.set(xticks=[], yticks=[])
            axes.set_xlabel("mirrored" if flips[epoch] else "as it is", size=7)
        row[0].set_ylabel(name, size=9)
    plt.show()


def draw_deviations(deviations):
    """Draw histograms of deviations, by the number of images in a group."""
    _, axes = plt.subplots()
    bins = np.linspace(-0.5, 0.5, 81)
    for (count, values), style, color in zip(deviations.items(), ("-", "--"), (BLACK, BLUE), strict=True):
        axes.hist(values, bins, density=True, histtype="step", ls=style, color=color, label=f"groups of {count} images")
    axes.set(xlabel="mean of a channel in a group, minus that of 2,048 images, in standard deviations", yticks=[])
    axes.set_title("A small group sees other means than the whole batch")
    axes.legend()
    plt.show()


def draw_directions(gradient, update):
    """Draw the singular values of a gradient and of its update, relative to the largest."""
    _, axes = plt.subplots()
    for matrix, name, style in ((gradient, "gradient", "--"), (update, "after three Newton-Schulz steps", "-")):
        sizes = torch.linalg.svdvals(matrix)
        axes.semilogy(sizes / sizes.max(), style, color=BLACK, label=name)
    axes.set(xlabel="directions (singular values), largest first", ylabel="size, of the largest", ylim=(1e-3, 2))
    axes.set_title("Muon: weak directions count, too (first step of one layer)")
    axes.legend(loc="lower left")
    plt.show()


def draw_rates(schedules):
    """Draw rates over a run, relative to their peaks: (name, epochs, rate at a time in epochs)."""
    _, axes = plt.subplots()
    for (name, epochs, rate), style in zip(schedules, (":", "-.", "-", "--"), strict=True):
        times = np.linspace(0, epochs, 500)
        rates = np.array([rate(time) for time in times])
        color = BLUE if name == "muon" else BLACK
        axes.plot(times / epochs, rates / rates.max(), style, color=color, label=f"{name}, {epochs} epochs")
    axes.set(xlabel="part of the run", ylabel="rate, of the peak")
    axes.set_title("Later recipes reach the peak sooner")
    axes.legend()
    plt.show()


def draw_effects(recipes):
    """Draw effects, (name, mean, low, high), by title, from top to bottom."""
    figure, both = plt.subplots(len(recipes), 1, figsize=(7, 4.4), sharex=True)
    figure.suptitle("Whitening helps both recipes; Muon brings the most to muon", weight="bold", size=11)
    for axes, (title, effects) in zip(both, recipes.items(), strict=True):
        for place, (_, mean, low, high) in enumerate(effects):
            axes.plot([low, high], [place, place], color=BLACK)
            axes.plot(mean, place, "o", color=BLACK)
        axes.axvline(0, color="0.6", lw=0.8)
        axes.set_yticks(range(len(effects)), [name for name, *_ in effects])
        axes.invert_yaxis()
        axes.set_title(title)
    both[-1].set_xlabel("points of accuracy that it brings")
    plt.show()


def draw_accuracy(campaigns):
    """Draw accuracy against the PFLOP so far: (name, number of runs, work of each epoch, accuracy after it)."""
    _, axes = plt.subplots(figsize=(7, 3))
    for (name, runs, work, accuracy), style in zip(campaigns, ("--", "-.", "-"), strict=True):
        color = BLUE if "earlier" in name else BLACK
        axes.plot(np.cumsum(work), accuracy, style, color=color, label=f"{name}, n = {runs}")
    axes.set(xscale="log", ylim=(40, 97), xlabel="PFLOP of training so far, logarithmic")
    axes.set_ylabel("test accuracy, %, median")
    axes.set_title("94% for 0.17 PFLOP instead of 1.8")
    axes.legend()
    plt.show()


def draw_errors(images, answers, truths, sure, title):
    """Draw ten images, with the answer and how sure it is, and the truth."""
    figure, panels = plt.subplots(2, 5, figsize=(7, 4))
    figure.get_layout_engine().set(hspace=0.08)  # between a truth and the next answer
    for axes, image, answer, truth, probability in zip(panels.flat, images, answers, truths, sure, strict=False):
        axes.imshow(image)
        axes.set_title(f"taken for\n{answer}, {probability:.0%}", size=9, loc="center")
        axes.set_xlabel(f"truth: {truth}", size=9)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[])
    figure.suptitle(title, weight="bold", size=10)
    plt.show()
