"""The page for tenants says of each folder of the corpus what the tests show."""

from tests.corpus.page import DOCUMENT, written


def test_the_page_has_the_table_of_the_corpus():
    page = DOCUMENT.read_text()
    assert page == written(page), "run: python -m tests.corpus.page"


def test_the_page_names_every_trainer_that_people_ask_about():
    text = DOCUMENT.read_text().partition("<!--")[0]
    trainers = ("PEFT", "transformers", "TRL", "Unsloth", "LLaMA-Factory", "ms-swift", "Axolotl",
                "torchtune", "MLX", "NeMo")  # fmt: skip
    assert [trainer for trainer in trainers if trainer not in text] == []
