"""Windows of images: the patches of a convolution, and what a pooling takes one pixel from."""

from __future__ import annotations


def windows_along(
    pixels: int, kernel: int, stride: int, padding: int, dilation: int, *, ceil_mode: bool = False
) -> int:
    """How many windows there are along one dimension of an image; below 1 where none fits.

    Args:
        pixels: of the image.
        kernel: elements of a window.
        stride: pixels from one window to the next.
        padding: pixels added on either side.
        dilation: pixels from one element to the next.
        ceil_mode: whether the last window may reach over the end, if it begins before it; as in `torch.nn.MaxPool2d`.

    Example:
        >>> windows_along(5, 2, 2, 0, 1), windows_along(5, 2, 2, 0, 1, ceil_mode=True)
        (2, 3)
    """
    room = pixels + 2 * padding - dilation * (kernel - 1) - 1
    windows = (room + (stride - 1 if ceil_mode else 0)) // stride + 1
    return windows - 1 if ceil_mode and (windows - 1) * stride >= pixels + padding else windows
