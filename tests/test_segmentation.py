import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from worldmodels.segmentation import adjusted_rand, contingency, matched_iou


def table(true, said, counts=None):
    true, said = torch.as_tensor(true), torch.as_tensor(said)
    return contingency(true, said, torch.ones_like(true, dtype=torch.bool) if counts is None else counts)


def test_the_rand_index_is_scikit_learns():
    generator = torch.Generator().manual_seed(0)
    true = torch.randint(5, (60, 40), generator=generator)
    said = torch.where(
        torch.rand(60, 40, generator=generator) < 0.4, torch.randint(7, (60, 40), generator=generator), true
    )
    true[0], said[1], true[2], said[2] = 3, 2, 1, 0  # one segment in one picture, in the other, and in both
    counts = torch.rand(60, 40, generator=generator) < 0.7
    for chosen in (torch.ones_like(counts), counts):
        found = adjusted_rand(table(true, said, chosen))
        for i in range(60):
            expected = adjusted_rand_score(true[i, chosen[i]].numpy(), said[i, chosen[i]].numpy())
            assert float(found[i]) == pytest.approx(expected, abs=1e-12)


def test_the_rand_index_by_hand():
    # 6 pixels: 2 pairs together in both, 6 in the first, 3 in the second, of 15: (2 - 1.2) / (4.5 - 1.2).
    found = adjusted_rand(table([[0, 0, 0, 1, 1, 1]], [[0, 0, 1, 1, 2, 2]]))
    assert float(found[0]) == pytest.approx(0.8 / 3.3)
    assert torch.equal(adjusted_rand(table([[0, 1, 1]], [[5, 2, 2]])), torch.ones(1, dtype=torch.float64))
    assert bool(adjusted_rand(table([[0, 1]], [[0, 1]], torch.zeros(1, 2, dtype=torch.bool))).isnan().all())


def test_the_overlap_is_of_the_best_assignment():
    true = [[0, 0, 1, 1, 1, 2, 2, 2], [0] * 8]
    said = [[3, 3, 3, 0, 0, 0, 1, 1], [1] * 8]  # 1 is best served by 0 (2 of 4), 2 by 1 (2 of 3)
    found = matched_iou(table(true, said)).numpy()
    assert found[0] == pytest.approx((2 / 4 + 2 / 3) / 2) and np.isnan(found[1])
    shared = matched_iou(table([[1, 1, 2, 2]], [[0, 0, 0, 0]]))  # one segment cannot stand for both
    assert float(shared[0]) == pytest.approx((2 / 4 + 0) / 2)
    assert float(matched_iou(table([[0, 2, 2]], [[0, 1, 1]]))[0]) == 1.0  # there is no segment 1
