"""Log-probs and entropies without the logits equal the plain ones, values and all three gradients, for every chunk
size; the temperature is applied; half precision agrees; only `chunk` rows of logits ever exist; a NaN row without
gradient stays alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from learner import logprobs
from learner.logprobs import chunked_logprobs


def plain(h: Tensor, w: Tensor, y: Tensor, temperature: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    z = h @ w.t() if bias is None else h @ w.t() + bias
    logp = torch.log_softmax(z / temperature, -1)
    return logp.gather(-1, y[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def leaves(
    dtype: torch.dtype = torch.float64, t: int = 11, d: int = 6, v: int = 17
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    h, w, b = (
        torch.randn(*s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in ((t, d), (v, d), (v,))
    )
    return h, w, b, torch.randint(0, v, (t,), generator=g)


@pytest.mark.parametrize("chunk", [1, 3, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("tile", [1, 12, 1 << 20])
@pytest.mark.parametrize("strip", [1, 50, 1 << 20])
def test_equal_to_the_plain_form(
    chunk: int,
    temperature: float,
    with_bias: bool,
    with_entropy: bool,
    tile: int,
    strip: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logprobs, "TILE", (tile, tile))  # logits of a tile: 1 column, a few, or all of them
    monkeypatch.setattr(logprobs, "STRIP", (strip, strip))  # and of a strip: 1 row, a few, or all of them
    h, w, b, y = leaves()
    bias = b if with_bias else None
    pull = torch.linspace(-1, 2, len(y), dtype=torch.float64)
    results = []
    for form in (plain(h, w, y, temperature, bias), chunked_logprobs(h, w, y, temperature, chunk, bias)):
        logp, entropy = form
        total = (pull * logp).sum() + (0.3 * (pull * entropy).sum() if with_entropy else 0.0)
        wanted = [h, w, b] if with_bias else [h, w]
        results.append((logp.detach(), entropy.detach(), *torch.autograd.grad(total, wanted)))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_gradcheck() -> None:
    h, w, b, y = leaves(t=4, d=3, v=5)
    assert torch.autograd.gradcheck(lambda h, w, b: chunked_logprobs(h, w, y, 0.8, 2, b), (h, w, b))


def test_large_logits_cost_no_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maxima that differ by hundreds between tiles, in float32: as good as torch's own log_softmax."""
    monkeypatch.setattr(logprobs, "TILE", (22, 22))
    h, w, _, y = leaves(torch.float32)
    h, w = (h * 30).detach(), w.detach()
    exact = plain(h.double(), w.double(), y, 1.0, None)
    for got, want in zip(chunked_logprobs(h, w, y), exact, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fp32_head", [False, True])
def test_bfloat16_gives_float32_results_near_the_exact_ones(fp32_head: bool) -> None:
    h, w, _, y = leaves(torch.bfloat16)
    exact = plain(h.double(), w.double(), y, 1.0, None)
    logp, entropy = chunked_logprobs(h, w, y, 1.0, 4, fp32_head=fp32_head)
    assert logp.dtype == entropy.dtype == torch.float32
    tolerance = 1e-5 if fp32_head else 5e-2  # the product itself in bfloat16 costs three digits
    torch.testing.assert_close(logp.double(), exact[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(entropy.double(), exact[1], rtol=0, atol=tolerance)
    logp.sum().backward()
    assert h.grad is not None and h.grad.dtype == torch.bfloat16
    want = torch.autograd.grad(exact[0].sum(), h)[0]
    torch.testing.assert_close(h.grad.double(), want.double(), rtol=3e-2, atol=3e-2)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_no_tensor_is_larger_than_a_tile_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 tokens, vocabulary 2000, chunks of 16: nothing near 512 x 2000 exists, forward or backward; not even a chunk
    of 16 x 2000 where a tile is smaller."""
    h, w, _, _ = leaves(torch.float32, t=512, d=8, v=2000)
    y = torch.zeros(512, dtype=torch.long)
    for tile, largest in ((1 << 20, 16 * 2000), (20_000, 20_000)):
        monkeypatch.setattr(logprobs, "TILE", (tile, tile))
        with LargestTensor() as seen:
            logp, entropy = chunked_logprobs(h, w, y, 1.0, 16)
            (logp.sum() + entropy.sum()).backward()
        assert seen.elements == largest


def test_a_row_without_gradient_does_not_spread_its_nan() -> None:
    h, w, _, y = leaves()
    with torch.no_grad():
        h[2] = torch.nan
    logp, entropy = chunked_logprobs(h, w, y, 1.0, 4)
    keep = torch.ones(len(y), dtype=torch.bool)
    keep[2] = False
    (torch.where(keep, logp, 0.0).sum() + torch.where(keep, entropy, 0.0).sum()).backward()
    assert h.grad is not None and w.grad is not None
    assert torch.isfinite(h.grad).all() and torch.isfinite(w.grad).all()
    assert not h.grad[2].any()


def test_frozen_head_or_frozen_trunk() -> None:
    h, w, _, y = leaves()
    chunked_logprobs(h, w.detach(), y)[0].sum().backward()
    assert h.grad is not None and w.grad is None
    h.grad = None
    chunked_logprobs(h.detach(), w, y)[0].sum().backward()
    assert h.grad is None and w.grad is not None


def test_no_positions_at_all() -> None:
    h, w, _, y = leaves()
    logp, entropy = chunked_logprobs(h[:0], w, y[:0])
    (logp.sum() + entropy.sum()).backward()
    assert w.grad is not None and not w.grad.any()


def test_extreme_logits_stay_finite() -> None:
    """One logit at +1e4: entropy 0 and log-probs finite; a masked-out vocabulary entry at -inf adds nothing."""
    w = torch.eye(4, dtype=torch.float64)
    h = torch.tensor([[1e4, 0, 0, 0], [0.0, 1.0, -torch.inf, 2.0]], dtype=torch.float64)
    # -inf times 0 would be NaN in the product, so give the logits through the identity by hand
    h[1, 2] = -1e30
    leaf = h.requires_grad_()
    logp, entropy = chunked_logprobs(leaf, w, torch.tensor([0, 3]), chunk=1)
    (logp.sum() + entropy.sum()).backward()
    assert torch.isfinite(logp).all() and torch.isfinite(entropy).all()
    assert leaf.grad is not None and torch.isfinite(leaf.grad).all()
    assert float(entropy[0].detach()) == 0.0
