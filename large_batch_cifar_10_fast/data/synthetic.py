"""Draw ten shapes on textured backgrounds, with random positions, sizes, tilts, colors and textures.

They are a small stand-in for CIFAR-10. A small convolutional network learns the classes, a linear model does not.
"""

import numpy as np

CLASSES = ("disc", "ring", "square", "frame", "triangle", "plus", "cross", "bars", "star", "moon")
TRAIN_COUNT, TEST_COUNT = 8192, 2000
SEED = 1912


def draw_shapes(train: int = TRAIN_COUNT, test: int = TEST_COUNT) -> tuple[np.ndarray, ...]:
    """Return images uint8 [train, 32, 32, 3], labels int64 [train], then those for test: always the same ones."""
    random = np.random.default_rng(SEED)
    labels = np.arange(train + test) % len(CLASSES)
    labels[:train], labels[train:] = random.permutation(labels[:train]), random.permutation(labels[train:])
    images = _paint(labels, random)
    return images[:train], labels[:train], images[train:], labels[train:]


def _paint(labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    count = len(labels)
    y, x = np.mgrid[0:32, 0:32].astype(np.float32)

    def draw(low: float, high: float, *more: int) -> np.ndarray:
        return random.uniform(low, high, (count, *more, 1, 1)).astype(np.float32)

    size, tilt = draw(4, 10), draw(-0.35, 0.35)
    across, down = x - draw(11, 20), y - draw(11, 20)
    u = (across * np.cos(tilt) + down * np.sin(tilt)) / size
    v = (down * np.cos(tilt) - across * np.sin(tilt)) / size
    # Distance in pixels to the edge of the shape, negative outside: edges are smooth.
    depth = np.empty((count, 32, 32), np.float32)
    for label, name in enumerate(CLASSES):
        mine = labels == label
        depth[mine] = _depth(name, u[mine], v[mine]) * size[mine]
    cover = np.clip(depth + 0.5, 0, 1)[..., None]
    wave = np.zeros((count, 32, 32), np.float32)
    for _ in range(3):
        wave += draw(5, 30) * np.sin(draw(-0.9, 0.9) * x + draw(-0.9, 0.9) * y + draw(0, 6.3))
    ground = random.uniform(40, 215, (count, 1, 1, 3)).astype(np.float32)
    # The shape differs from the ground by at least 40 of 255 levels in every channel.
    paint = (ground + random.uniform(40, 216, ground.shape).astype(np.float32)) % 256
    noise = 18 * random.standard_normal((count, 32, 32, 3), dtype=np.float32)  # drawn here: the order of draws is fixed
    pixels = (ground + wave[..., None]) * (1 - cover) + paint * cover
    for _ in range(2):  # specks, unrelated to the class
        speck = np.clip(draw(1, 2.5) - np.hypot(x - draw(0, 31), y - draw(0, 31)) + 0.5, 0, 1)[..., None]
        pixels += speck * (random.uniform(0, 255, ground.shape).astype(np.float32) - pixels)
    return np.clip(np.rint(pixels + noise), 0, 255).astype(np.uint8)


def _depth(name: str, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the distance to the edge, positive inside, of a shape about as large as the unit disc."""
    radius, box = np.hypot(u, v), np.maximum(np.abs(u), np.abs(v))
    p, q = np.abs(u + v) * 0.71, np.abs(u - v) * 0.71
    return {
        "disc": lambda: 0.9 - radius,
        "ring": lambda: 0.22 - np.abs(radius - 0.75),
        "square": lambda: 0.8 - box,
        "frame": lambda: 0.2 - np.abs(box - 0.7),
        "triangle": lambda: np.minimum(0.5 - v, 0.5 + v / 2 - np.abs(u) * 0.87),
        "plus": lambda: np.minimum(0.25 - np.minimum(np.abs(u), np.abs(v)), 0.95 - box),
        "cross": lambda: np.minimum(0.25 - np.minimum(p, q), 1.0 - np.maximum(p, q)),
        "bars": lambda: np.minimum(0.25 - np.abs(np.abs(v) - 0.6), 0.9 - np.abs(u)),
        "star": lambda: (0.65 + 0.35 * np.cos(5 * np.arctan2(u, -v))) * 0.95 - radius,
        "moon": lambda: np.minimum(0.9 - radius, np.hypot(u - 0.5, v) - 0.65),
    }[name]()
