"""Draw ten shapes on textured backgrounds, with random positions, sizes, tilts, colors and textures.

They are a small stand-in for CIFAR-10. A small convolutional network learns the classes, a linear model does not.

Every machine draws the same bytes. IEEE 754 rounds +, -, *, / and the square root in one way only; sines, powers and
NumPy's normal and `uniform` draws depend on processor and compiler, and are not used. RandomState's stream is frozen.
"""

import numpy as np

CLASSES = ("disc", "ring", "square", "frame", "triangle", "plus", "cross", "bars", "star", "moon")
SEED = 1912


def draw_shapes(train: int = 8192, test: int = 2000) -> tuple[np.ndarray, ...]:
    """Return images uint8 [train, 32, 32, 3], labels int64 [train], then those for test: always the same ones."""
    random = np.random.RandomState(SEED)
    labels = np.arange(train + test) % len(CLASSES)
    labels[:train], labels[train:] = random.permutation(labels[:train]), random.permutation(labels[train:])
    images = _paint(labels, random)
    return images[:train], labels[:train], images[train:], labels[train:]


def _paint(labels: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    count = len(labels)
    y, x = np.mgrid[0:32, 0:32].astype(np.float32)

    def draw(low: float, high: float, *shape: int) -> np.ndarray:
        return (low + (high - low) * random.random_sample((count, *(shape or (1, 1))))).astype(np.float32)

    size = draw(4, 10)
    t = draw(-0.177, 0.177)  # the tangent of half a tilt, by up to 20 degrees
    cos = (1 - t * t) / (1 + t * t)
    sin = 2 * t / (1 + t * t)
    across = x - draw(11, 20)
    down = y - draw(11, 20)
    u = (across * cos + down * sin) / size
    v = (down * cos - across * sin) / size
    # Distance in pixels to the edge of the shape, negative outside: edges are smooth.
    depth = np.empty((count, 32, 32), np.float32)
    for label, name in enumerate(CLASSES):
        mine = labels == label
        depth[mine] = _depth(name, u[mine], v[mine]) * size[mine]
    cover = np.clip(depth + 0.5, 0, 1)[..., None]
    wave = np.zeros((count, 32, 32), np.float32)
    for _ in range(3):
        turns = draw(-0.14, 0.14) * x + draw(-0.14, 0.14) * y + draw(0, 1)
        turns -= np.rint(turns)
        wave += draw(5, 30) * turns * (8 - 16 * np.abs(turns))  # parabolas, much like a sine
    ground = draw(40, 215, 1, 1, 3)
    # The shape differs from the ground by at least 40 of 255 levels in every channel.
    paint = (ground + draw(40, 216, 1, 1, 3)) % 256
    pixels = (ground + wave[..., None]) * (1 - cover) + paint * cover
    for _ in range(2):  # specks, unrelated to the class
        speck = np.clip(draw(1, 2.5) - _length(x - draw(0, 31), y - draw(0, 31)) + 0.5, 0, 1)[..., None]
        pixels += speck * (draw(0, 255, 1, 1, 3) - pixels)
    # Noise: the sum of three uniform bytes, nearly normal, scaled to a standard deviation of 18 levels.
    noise = sum(random.randint(0, 256, pixels.shape, np.uint8).astype(np.float32) for _ in range(3))
    return np.clip(np.rint(pixels + (noise - 382.5) * 0.1406), 0, 255).astype(np.uint8)


def _length(across: np.ndarray, down: np.ndarray) -> np.ndarray:
    return np.sqrt(across * across + down * down)


def _depth(name: str, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the distance to the edge, positive inside, of a shape about as large as the unit disc."""
    radius = _length(u, v)
    box = np.maximum(np.abs(u), np.abs(v))
    p = np.abs(u + v) * 0.71
    q = np.abs(u - v) * 0.71
    cos = -v / np.maximum(radius, 1e-6)  # cosine of the angle from the top
    square = cos * cos
    # The cosine of five times the angle, for the star, by a Chebyshev polynomial.
    cos_of_five_times = ((16 * square - 20) * square + 5) * cos
    return {
        "disc": lambda: 0.9 - radius,
        "ring": lambda: 0.22 - np.abs(radius - 0.75),
        "square": lambda: 0.8 - box,
        "frame": lambda: 0.2 - np.abs(box - 0.7),
        "triangle": lambda: np.minimum(0.5 - v, 0.5 + v / 2 - np.abs(u) * 0.87),
        "plus": lambda: np.minimum(0.25 - np.minimum(np.abs(u), np.abs(v)), 0.95 - box),
        "cross": lambda: np.minimum(0.25 - np.minimum(p, q), 1.0 - np.maximum(p, q)),
        "bars": lambda: np.minimum(0.25 - np.abs(np.abs(v) - 0.6), 0.9 - np.abs(u)),
        "star": lambda: (0.65 + 0.35 * cos_of_five_times) * 0.95 - radius,
        "moon": lambda: np.minimum(0.9 - radius, _length(u - 0.5, v) - 0.65),
    }[name]()
