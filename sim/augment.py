"""Random changes to training images, the papers': a small rotation, a shift, a mirror image."""

import numpy as np
import torch
from torch.nn import functional

MAX_DEGREES = 10.0
MAX_SHIFT = 0.2  # of the height and of the width


def augment(images: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Turn, shift and mirror each image of a batch by chance.

    Each image is turned by -10 to 10 degrees, shifted by up to a fifth of its height and of its
    width, and mirrored left to right in half of the cases. Values between pixels are interpolated;
    beyond the edge the pixels of the edge go on (as Keras's ImageDataGenerator fills).

    Parameters
    ----------
    images : float32 [batch, channel, height, width]
        Not changed.
    rng : numpy.random.Generator

    Returns
    -------
    float32 [batch, channel, height, width]
    """
    count, _, height, width = images.shape
    angles = np.radians(rng.uniform(-MAX_DEGREES, MAX_DEGREES, count))
    shifts = rng.uniform(-MAX_SHIFT, MAX_SHIFT, (count, 2))
    mirrors = rng.choice([-1.0, 1.0], count)
    # Rows: x and y of the source over x, y, 1 of the result; the image spans -1 to 1.
    source = np.empty((count, 2, 3))
    source[:, 0, 0] = np.cos(angles) * mirrors
    source[:, 0, 1] = -np.sin(angles) * height / width
    source[:, 1, 0] = np.sin(angles) * mirrors * width / height
    source[:, 1, 1] = np.cos(angles)
    source[:, :, 2] = 2 * shifts
    matrices = torch.from_numpy(source).to(images)
    grid = functional.affine_grid(matrices, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
