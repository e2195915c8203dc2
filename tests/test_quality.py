"""PSNR, SSIM and relative error against values worked out by hand, a direct sum, and scikit-image where installed."""

import math

import numpy as np
import pytest
import torch

from foveate.quality import flicker, ms_ssim, psnr, relative_error, similarities, ssim


def pair(height: int = 24, width: int = 31) -> tuple[np.ndarray, np.ndarray]:
    """A smooth uint8 (3, H, W, 3) video and a noisy copy."""
    draw = np.random.default_rng(0)
    y, x = np.mgrid[:height, :width]
    clean = 128 + 90 * np.sin(x / 5 + np.arange(3)[:, None, None]) * np.cos(y / 7)
    clean = np.repeat(clean[..., None], 3, axis=-1)
    noisy = clean + draw.normal(0, 12, clean.shape)
    return noisy.clip(0, 255).astype(np.uint8), clean.astype(np.uint8)


def as_float(video: np.ndarray) -> torch.Tensor:
    """uint8 (T, H, W, 3) -> float32 (3, T, H, W) in -1 ... 1."""
    return torch.from_numpy(video).permute(3, 0, 1, 2).float() / 127.5 - 1


def test_psnr_of_known_differences():
    a = np.full((2, 4, 4, 3), 100, np.uint8)
    b = a.copy()
    b[...] = 110
    assert psnr(b, a) == pytest.approx(20 * math.log10(255 / 10))
    assert psnr(a, a) == math.inf
    assert psnr(torch.full((4, 4), 0.2), torch.zeros(4, 4)) == pytest.approx(20.0)
    assert psnr(a, b) == psnr(b, a)  # no wrap-around in uint8


def test_both_layouts_agree():
    noisy, clean = pair()
    assert psnr(as_float(noisy), as_float(clean)) == pytest.approx(psnr(noisy, clean), abs=1e-4)
    assert ssim(as_float(noisy), as_float(clean)) == pytest.approx(ssim(noisy, clean), abs=1e-5)


def test_ssim_is_the_direct_sum():
    noisy, clean = (video[0, ..., 0].astype(float) for video in pair())
    place = np.arange(11) - 5
    weight = np.exp(-(place[:, None] ** 2 + place[None] ** 2) / 4.5)
    weight /= weight.sum()
    values = []
    for top in range(clean.shape[0] - 10):
        for left in range(clean.shape[1] - 10):
            a, b = (v[top : top + 11, left : left + 11] for v in (noisy, clean))
            ma, mb = (weight * a).sum(), (weight * b).sum()
            va, vb = (weight * (a - ma) ** 2).sum(), (weight * (b - mb) ** 2).sum()
            cov = (weight * (a - ma) * (b - mb)).sum()
            c1, c2 = 2.55**2, 7.65**2
            values.append((2 * ma * mb + c1) * (2 * cov + c2) / (ma**2 + mb**2 + c1) / (va + vb + c2))
    scale = torch.from_numpy(np.stack([noisy, clean])) / 127.5 - 1
    assert ssim(scale[0], scale[1]) == pytest.approx(np.mean(values), abs=1e-9)


def test_against_scikit_image():
    metrics = pytest.importorskip("skimage.metrics", reason="scikit-image is not installed")
    noisy, clean = pair(64, 80)
    wanted = [
        metrics.structural_similarity(
            a, b, data_range=255, channel_axis=-1, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
        )
        for a, b in zip(noisy, clean, strict=True)
    ]
    assert ssim(noisy, clean) == pytest.approx(np.mean(wanted), abs=1e-6)
    assert psnr(noisy, clean) == pytest.approx(metrics.peak_signal_noise_ratio(clean, noisy), abs=1e-9)


def test_ssim_orders_damage():
    noisy, clean = pair(64, 80)
    assert ssim(clean, clean) == pytest.approx(1.0)
    assert ssim(255 - clean, clean) < 0 < ssim(noisy, clean) < 0.95
    assert ssim(clean, noisy) == pytest.approx(ssim(noisy, clean))


def test_relative_error():
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])) == pytest.approx(4 / 3)
    assert relative_error(np.zeros(3), np.zeros(3)) == 0
    assert relative_error(np.ones(3), np.zeros(3)) == math.inf
    assert relative_error(np.uint8([0]), np.uint8([1])) == 1  # no wrap-around


def test_nan_is_not_hidden():
    bad = torch.zeros(12, 12)
    bad[0, 0] = math.nan
    assert all(math.isnan(measure(bad, torch.ones(12, 12))) for measure in (psnr, ssim, relative_error))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.zeros((2, 12, 12, 3), np.uint8), np.zeros((2, 12, 13, 3), np.uint8)),
        (np.zeros((2, 12, 12, 3), np.uint8), np.zeros((2, 12, 12, 3), np.float32)),
        (np.zeros((3, 12, 12), np.uint8), np.zeros((3, 12, 12), np.uint8)),
        (np.zeros((12, 12, 3), np.int64), np.zeros((12, 12, 3), np.int64)),
        (np.zeros((0, 12, 12, 3), np.uint8), np.zeros((0, 12, 12, 3), np.uint8)),
    ],
)
def test_mismatches_are_refused(a, b):
    for measure in (psnr, ssim):
        with pytest.raises(ValueError, match=r"videos must"):
            measure(a, b)


def test_small_pictures_are_refused():
    with pytest.raises(ValueError, match="at least 11"):
        ssim(torch.zeros(10, 20), torch.zeros(10, 20))
    with pytest.raises(ValueError, match="shapes differ"):
        relative_error(torch.zeros(3), torch.zeros(1, 3))


def test_ms_ssim_against_pytorch_msssim():
    library = pytest.importorskip("pytorch_msssim", reason="pytorch-msssim is not installed")
    noisy, clean = pair(176, 192)
    pictures = [torch.from_numpy(video).permute(0, 3, 1, 2).double() for video in (noisy, clean)]
    weight = torch.exp(-((torch.arange(11.0, dtype=torch.float64) - 5) ** 2) / 4.5)  # the library's own is float32
    window = (weight / weight.sum()).expand(3, 1, 1, 11)
    wanted = library.ms_ssim(*pictures, data_range=255, win=window)
    assert ms_ssim(noisy, clean) == pytest.approx(wanted.item(), abs=1e-6)
    assert ms_ssim(as_float(noisy), as_float(clean)) == pytest.approx(wanted.item(), abs=1e-5)
    assert similarities(noisy, clean) == (ssim(noisy, clean), ms_ssim(noisy, clean))
    assert ms_ssim(clean, clean) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="at least 161 x 161 pixels"):
        ms_ssim(noisy[:, :160], clean[:, :160])


def test_flicker_is_the_mean_change_between_frames():
    noisy, _ = pair()
    assert flicker(noisy) == pytest.approx(np.abs(np.diff(noisy.astype(float), axis=0)).mean())
    assert flicker(as_float(noisy)) == pytest.approx(flicker(noisy), abs=1e-4)
    assert flicker(noisy[:1].repeat(3, 0)) == 0
    with pytest.raises(ValueError, match="two frames"):
        flicker(noisy[:1])
