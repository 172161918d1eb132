"""Models that read images and text, whose code between the two counts and searches in Python, train unchanged."""

import pytest
import torch

from support.jobs.transformer_jobs import SUBJECTS, Run, make_pipeline, run_in_pipeline, run_plainly, run_these
from support.processes import Pool
from support.training import assert_equal, assert_ranks_equal


@pytest.mark.sampled(2)
@pytest.mark.parametrize("subject", ["llava", "smolvlm", "vipllava"])
def test_padded_questions_about_images_have_the_numbers_of_the_plain_loop(subject: str) -> None:
    plain, split = run_plainly(subject), run_in_pipeline(Run(subject, "1f1b-flush", 3))

    assert set(plain.state) == set(split.state)
    assert_equal(plain, split)


def test_two_processes_train_a_llava(pool: Pool) -> None:
    run = Run("llava", "1f1b-flush", 2)

    assert_ranks_equal(pool.run(2, run_these, [run]), [run_plainly("llava")])


def test_a_llava_predicts_for_texts_of_any_length_with_and_without_padding() -> None:
    pipe, whole = make_pipeline(Run("llava", "1f1b-flush", 2)), SUBJECTS["llava"].build().eval()
    for samples, length in ((2, 13), (1, 6), (2, 8)):
        inputs = SUBJECTS["llava"].inputs(samples, length)
        with torch.no_grad():
            expected = whole(**inputs)
        found = pipe.predict(inputs)

        assert torch.equal(expected.logits, found.logits)
        # What the code before the layers of text has made is not handed on.
        assert found.image_outputs.last_hidden_state is None
