"""Which texts of a dataset become conversations, and what is refused instead of being read wrongly."""

import io
import re

import pandas
import pyarrow
import pytest
from datasets import Dataset, Features, Image, List, Value, load_dataset
from public_schemas import encoded, picture

from safe_trainers import RecipeError
from safe_trainers.data.dataset import DatasetArguments, prepare_dataset
from safe_trainers.recipes.yaml_file import read_file


@pytest.fixture(params=["mapped", "streamed"])
def prepare(request):
    """Prepares a dataset, and gives all of its rows."""

    def rows(dataset, needs_images=False, **keys):
        given = dataset.to_iterable_dataset() if request.param == "streamed" else dataset
        return list(prepare_dataset(given, DatasetArguments(**keys), "of mine", needs_images=needs_images))

    return rows


QUESTIONS = {"q": ["1+1?", "2+2?"], "a": ["2", "4"]}
COLUMNS = {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
def test_strings_of_any_width_become_conversations(kind, prepare):
    schema = pyarrow.schema([("q", kind), ("a", kind)])
    dataset = Dataset(pyarrow.table(QUESTIONS, schema=schema))
    rows = prepare(dataset, dataset_columns=COLUMNS)
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": text}] for text in QUESTIONS["q"]]
    assert rows[1]["completion"] == [{"role": "assistant", "content": "4"}]


def test_a_table_gives_the_same_rows_as_json_lines(prepare, tmp_path):
    made = []
    for name in ("csv", "json"):
        file = tmp_path / f"data.{name}"
        table = pandas.DataFrame(QUESTIONS).astype({"a": str})
        file.write_text(table.to_csv(index=False) if name == "csv" else table.to_json(orient="records", lines=True))
        dataset = load_dataset(name, data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
        made.append([row["prompt"] for row in prepare(dataset, dataset_columns={"prompt": "q", "solution": "a"})])
    assert made[0] == made[1]
    assert made[0][0] == [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize("keys", [{"dataset_limit": 1}, {"dataset_filter": {"completion": "2"}}])
def test_a_limit_or_a_filter_alone_changes_no_text(keys, prepare):
    dataset = Dataset.from_dict({"prompt": QUESTIONS["q"], "completion": QUESTIONS["a"]})
    assert prepare(dataset, **keys) == [{"prompt": "1+1?", "completion": "2"}]


def test_a_text_column_may_have_the_name_of_images(prepare):
    dataset = Dataset.from_dict({"text": ["a", "b"], "image": ["none", "none"]})
    assert prepare(dataset, dataset_limit=1) == [{"text": "a", "image": "none"}]


def with_images(count=1, **columns):
    rows = {"images": [[encoded(picture(seed=i)) for i in range(count)]], **{k: [v] for k, v in columns.items()}}
    return Dataset.from_dict(rows).cast_column("images", List(Image()))


def test_marks_in_messages_are_the_places_of_images(prepare):
    messages = [
        {"role": "user", "content": "<image> or <image>?"},
        {"role": "assistant", "content": "the first"},
    ]
    (row,) = prepare(with_images(2, messages=messages), dataset_columns={"messages": "messages", "images": "images"})
    first, answer = row["messages"]
    assert [part["type"] for part in first["content"]] == ["image", "text", "image", "text"]
    assert [part["text"] for part in answer["content"]] == ["the first"]
    with pytest.raises(RecipeError, match="the text has 2 times '<image>', but the row has 1 images"):
        prepare(with_images(1, messages=messages), dataset_columns={"messages": "messages", "images": "images"})


def test_without_marks_the_images_come_first(prepare):
    prompt = [{"role": "system", "content": "S"}, {"role": "user", "content": "which?"}]
    (row,) = prepare(with_images(2, prompt=prompt), dataset_columns={"prompt": "prompt", "images": "images"})
    assert [[part["type"] for part in m["content"]] for m in row["prompt"]] == [["text"], ["image", "image", "text"]]


def test_a_system_prompt_without_a_conversation_is_refused(prepare):
    with pytest.raises(RecipeError, match="has none in the columns text"):
        prepare(Dataset.from_dict({"text": ["a"]}), system_prompt="S")


def test_other_names_of_roles_are_read(prepare):
    talk = [{"from": "user", "value": "1+1?"}, {"from": "assistant", "value": "2"}]
    dataset = Dataset.from_dict({"conversations": [talk]})
    (row,) = prepare(dataset, dataset_columns={"messages": "conversations"}, system_prompt="S")
    assert [(m["role"], m["content"]) for m in row["messages"]] == [
        ("system", "S"), ("user", "1+1?"), ("assistant", "2")
    ]  # fmt: skip
    with pytest.raises(RecipeError, match=r"dataset_columns: \{messages: conversations\}"):
        prepare(dataset, system_prompt="S")


@pytest.mark.parametrize(("value", "why"), [(None, "is empty"), (["a", "b"], "is a list, and not text or a number")])
def test_a_template_accepts_text_and_numbers_only(value, why, prepare):
    dataset = Dataset.from_dict({"prompt": ["what?"], "options": [value]})
    with pytest.raises(RecipeError, match=f"column 'options', which prompt_template writes, {why}"):
        prepare(dataset, prompt_template="{prompt} {options}")
    (row,) = prepare(dataset.remove_columns("options").add_column("n", [3]), prompt_template="{prompt} {n}")
    assert row["prompt"] == [{"role": "user", "content": "what? 3"}]


def test_rows_without_an_image_are_refused_without_another_key(prepare):
    rows = {"image": [encoded(picture()), None], "prompt": ["a", "b"]}
    dataset = Dataset.from_dict(rows, Features(image=Image(), prompt=Value("string")))
    with pytest.raises(RecipeError, match="has no image"):
        prepare(dataset, needs_images=True)


def test_a_check_of_images_alone_changes_nothing(prepare):
    rows = {"image": [encoded(picture())] * 2, "prompt": ["USER: <image> What? ASSISTANT:", "b"], "n": [1, 2]}
    dataset = Dataset.from_dict(rows, Features(image=Image(), prompt=Value("string"), n=Value("int64")))
    found = prepare(dataset, needs_images=True)
    assert [(row["prompt"], row["n"]) for row in found] == list(zip(rows["prompt"], rows["n"], strict=True))
    assert [row["image"].tobytes() for row in found] == [picture().tobytes()] * 2
    assert prepare(dataset.remove_columns("image"), needs_images=True) == list(dataset.remove_columns("image"))
    assert prepare_dataset(dataset, DatasetArguments(), "of mine", needs_images=True) is dataset


CHOOSING = ({"dataset_limit": 1}, {"dataset_filter": {"n": 1}}, {"image_max_size": 50}, {"image_min_size": 20})


@pytest.mark.parametrize("needs_images", [False, True])
@pytest.mark.parametrize("keys", CHOOSING, ids=str)
def test_keys_that_choose_rows_change_nothing_in_them(keys, needs_images, prepare):
    messages = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "write <image> here"}]
    rows = {
        "image": [encoded(picture(40, 30)), encoded(picture(60, 10))],
        "messages": [messages, messages], "prompt": ["USER: <image> What? ASSISTANT:", "b"], "n": [1, 2],
    }  # fmt: skip
    dataset = Dataset.from_dict(rows).cast_column("image", Image())
    (row,) = prepare(dataset, needs_images=needs_images, **keys)
    assert row["image"].tobytes() == picture(40, 30).tobytes()
    assert {name: value for name, value in row.items() if name != "image"} == {
        "messages": messages, "prompt": rows["prompt"][0], "n": 1
    }  # fmt: skip


def test_lists_of_images_are_opened_in_the_rows_that_are_chosen(prepare):
    rows = {"images": [[encoded(picture(40, 30))], [encoded(picture()), encoded(picture(60, 10))], []], "n": [1, 2, 2]}
    dataset = Dataset.from_dict(rows, Features(images=List(Image()), n=Value("int64")))
    found = prepare(dataset, dataset_filter={"n": 2})
    sizes = [[image.size for image in row["images"]] for row in found]
    assert sizes == [[picture().size, (60, 10)], []]


def test_only_rows_that_are_kept_need_an_image(prepare):
    rows = {"image": [None, encoded(picture()), None], "n": [1, 2, 3]}
    dataset = Dataset.from_dict(rows, Features(image=Image(), n=Value("int64")))
    (row,) = prepare(dataset, needs_images=True, dataset_filter={"n": 2})
    assert row["n"] == 2
    with pytest.raises(RecipeError, match="has no image"):
        prepare(dataset, needs_images=True, dataset_filter={"n": [2, 3]})


@pytest.mark.parametrize("times", [1, 2])
def test_a_mark_in_an_answer_is_text(times, prepare):
    answer = " ".join(["write <image> here"] * times)
    messages = [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": answer}]
    rows = {"messages": [messages], "image": [encoded(picture())]}
    dataset = Dataset.from_dict(rows).cast_column("image", Image())
    (row,) = prepare(dataset, dataset_columns={"messages": "messages", "image": "image"})
    question, reply = (message["content"] for message in row["messages"])
    assert [part["type"] for part in question] == ["image", "text"]
    assert [part["text"] for part in reply] == [answer]


QUOTED = {
    "True": (["True", "maybe"], ["True"]),
    "[true, maybe, null]": (["maybe", "TRUE", None], ["TRUE", "maybe", None]),
    "no": (["a", "b"], ["a"]),  # none of its strings: another one, since a filter has to keep rows
    "1e-5": (["2e-5", "1e-5"], ["1e-5"]),
    "[1_000, x]": (["1000", "x"], ["1000", "x"]),
    "007": (["07", "7"], ["07"]),
    "2024-01-01": (["2023-01-01", "2024-01-01"], ["2024-01-01"]),
}
"""Values of a filter as they are written, with the strings of a column, and the values to advise."""


@pytest.mark.parametrize("text", QUOTED)
def test_the_advised_filter_of_strings_keeps_rows(text, prepare, tmp_path):
    strings, advised = QUOTED[text]
    dataset = Dataset.from_dict({"ok": strings})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"dataset_filter: {{ok: {text}}}\n")
    with pytest.raises(RecipeError, match="column 'ok' of dataset of mine holds strings, and YAML reads") as caught:
        prepare(dataset, dataset_filter=read_file(recipe).entries["dataset_filter"].value)
    recipe.write_text(re.search(r"dataset_filter: \{.*\}", str(caught.value))[0])
    filters = read_file(recipe).entries["dataset_filter"].value
    assert filters == {"ok": advised}
    assert [row["ok"] for row in prepare(dataset, dataset_filter=filters)] == [s for s in strings if s in advised]


def test_the_advised_string_may_come_late_in_a_dataset():
    dataset = Dataset.from_dict({"ok": ["a"] * 2000 + ["True"]})
    with pytest.raises(RecipeError, match=r'dataset_filter: \{ok: \["True"\]\}'):
        prepare_dataset(dataset, DatasetArguments(dataset_filter={"ok": True}), "of mine")


def test_true_and_false_do_not_filter_strings(prepare):
    dataset = Dataset.from_dict({"ok": ["yes", "maybe"], "prompt": ["a", "b"]})
    with pytest.raises(RecipeError, match="column 'ok' of dataset of mine holds strings, and YAML reads True"):
        prepare(dataset, dataset_filter={"ok": [True, "maybe"]})


def test_paths_and_bytes_are_images(prepare, tmp_path):
    buffer = io.BytesIO()
    picture().save(buffer, format="PNG")
    file = tmp_path / "1.png"
    file.write_bytes(buffer.getvalue())
    for value in (str(file), buffer.getvalue(), [str(file)], {"bytes": buffer.getvalue(), "path": None}):
        dataset = Dataset.from_dict({"q": ["?"], "photo": [value]})
        (row,) = prepare(dataset, needs_images=True, dataset_columns={"prompt": "q", "images": "photo"})
        assert row["images"][0].tobytes() == picture().tobytes()
