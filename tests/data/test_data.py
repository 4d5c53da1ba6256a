"""Public datasets become the columns of a recipe: on local files with their features, mapped and streamed."""

import io

import datasets
import public_schemas
import pytest
import yaml
from datasets import Dataset, Features, Image, List, Value
from public_schemas import encoded, picture

from safe_trainers import RecipeError
from safe_trainers.data import images as pictures
from safe_trainers.data.dataset import DatasetArguments, prepare_dataset
from safe_trainers.data.images import new_size
from safe_trainers.recipes.load import read_recipe


OPEN_R1 = {"prompt": "problem", "images": "image", "solution": "solution"}


@pytest.fixture(params=["mapped", "streamed"])
def prepare(request):
    """Prepares a dataset, and gives all of its rows."""

    def rows(dataset, name="of mine", needs_images=True, **keys):
        given = dataset.to_iterable_dataset() if request.param == "streamed" else dataset
        return list(prepare_dataset(given, DatasetArguments(**keys), name, needs_images=needs_images))

    return rows


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads a local file with the columns of a public dataset."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return lambda name, split: datasets.load_dataset(str(public_schemas.write(name, tmp_path)), split=split)


def said(message):
    """A message's role, and its parts without what is empty."""
    content = message["content"]
    parts = content if isinstance(content, str) else [part["text"] or f"<{part['type']}>" for part in content]
    return message["role"], parts


def test_open_r1(prepare, load):
    dataset = load("lmms-lab/multimodal-open-r1-8k-verified", "train")
    rows = prepare(dataset, dataset_columns=OPEN_R1, system_prompt="Think.", image_max_size=40, image_mode="RGB")
    assert {image.size for row in rows for image in row["images"]} == {(32, 32), (40, 32)}
    assert len(rows) == sum(max(picture.size) <= 40 for picture in dataset["image"]) < len(dataset)
    assert {image.mode for row in rows for image in row["images"]} == {"RGB"} != {i.mode for i in dataset["image"]}
    assert set(rows[0]) == {"prompt", "images", "solution"}
    assert [said(m) for m in rows[1]["prompt"]] == [
        ("system", ["Think."]), ("user", ["<image>", "how many squares? 1"])
    ]  # fmt: skip
    assert rows[1]["solution"] == dataset[1]["solution"]


def test_geometry3k_keeps_the_places_of_its_pictures(prepare, load):
    dataset = load("hiyouga/geometry3k", "train")
    template = r"{problem} Put it in \boxed{}, not in {{problem}}."
    rows = prepare(
        dataset, dataset_columns={"prompt": "problem", "images": "images", "solution": "answer"},
        prompt_template=template, image_min_pixels=4096, image_max_pixels=4096, image_mode="RGB", dataset_limit=3,
    )  # fmt: skip
    assert len(rows) == 3
    wanted = r"what is x? 1 Put it in \boxed{}, not in {problem}."
    assert [said(m) for m in rows[1]["prompt"]] == [("user", ["<image>", wanted])]
    assert rows[1]["solution"] == r"2 \sqrt { 221 }"
    assert [row["images"][0].size for row in rows[:2]] == [(64, 64), (72, 58)]


def test_mathvista_takes_its_pictures_from_another_column_than_image(prepare, load):
    dataset = load("AI4Math/MathVista", "testmini")
    columns = {"prompt": "question", "images": "decoded_image", "solution": "answer"}
    keys = {"dataset_filter": {"answer_type": ["integer", "float"]}, "image_resize": [16, 24]}
    rows = prepare(dataset, dataset_columns=columns, **keys)
    assert [row["solution"] for row in rows] == ["0", "2.5", "4", "6.5"]
    assert {row["images"][0].size for row in rows} == {(16, 24)}
    assert len(prepare(dataset, dataset_columns=columns, dataset_filter={"answer_type": "text"})) == 4
    with pytest.raises(
        RecipeError, match="column 'image' of dataset of mine does not hold images; did you mean 'decoded_"
    ):
        prepare(dataset, dataset_columns={**columns, "images": "image"})


def test_llava_conversations_are_taken_as_they_are(prepare, load):
    dataset = load("HuggingFaceH4/llava-instruct-mix-vsft", "train")
    columns = {"messages": "messages", "images": "images"}
    rows = prepare(dataset, dataset_columns=columns, image_mode="RGB")
    assert rows[0]["messages"] == dataset[0]["messages"]
    told = prepare(dataset, dataset_columns=columns, system_prompt="Be brief.")[0]["messages"]
    assert said(told[0]) == ("system", ["Be brief."])
    assert [said(m) for m in told[1:]] == [said(m) for m in dataset[0]["messages"]]


def test_llava_mix_and_preferences(prepare, load):
    mix = load("trl-lib/llava-instruct-mix", "train")
    rows = prepare(mix, dataset_columns={"prompt": "prompt", "completion": "completion", "images": "images"})
    assert [said(m) for m in rows[0]["prompt"]] == [("user", ["<image>", "what is in the picture?"])]
    assert [said(m) for m in rows[0]["completion"]] == [("assistant", "two blue circles")]
    pairs = load("trl-lib/ultrafeedback_binarized", "train")
    columns = {"chosen": "chosen", "rejected": "rejected"}
    rows = prepare(pairs, needs_images=False, dataset_columns=columns, system_prompt="S")
    assert set(rows[0]) == {"chosen", "rejected"}
    for side in columns:
        assert [said(m) for m in rows[0][side]] == [("system", "S"), *map(said, pairs[0][side])]


def test_texts_become_conversations(prepare):
    dataset = Dataset.from_dict({"q": ["1+1?"], "good": ["2"], "bad": ["3"]})
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    (row,) = prepare(dataset, needs_images=False, dataset_columns=columns, system_prompt="S")
    assert [said(m) for m in row["prompt"]] == [("system", "S"), ("user", "1+1?")]
    assert [said(m) for m in row["chosen"]] == [("assistant", "2")]  # the system prompt is in the prompt
    assert [said(m) for m in row["rejected"]] == [("assistant", "3")]


def many(count=2, text="<image> or <image>?"):
    features = Features(images=List(Image()), q=Value("string"))
    return Dataset.from_dict({"images": [[encoded(picture(seed=i)) for i in range(count)]], "q": [text]}, features)


def test_several_pictures_and_their_places(prepare):
    columns = {"prompt": "q", "images": "images"}
    (row,) = prepare(many(), dataset_columns=columns)
    assert [said(m) for m in row["prompt"]] == [("user", ["<image>", " or ", "<image>", "?"])]
    assert [image.tobytes() for image in row["images"]] == [picture(seed=i).tobytes() for i in range(2)]
    (row,) = prepare(many(text="which?"), dataset_columns=columns)
    assert [said(m) for m in row["prompt"]] == [("user", ["<image>", "<image>", "which?"])]
    with pytest.raises(RecipeError, match="the text has 2 times '<image>', but the row has 3 images"):
        prepare(many(3), dataset_columns=columns)


def test_a_photo_is_turned_as_its_camera_was(prepare):
    photo = picture(40, 20)
    exif = photo.getexif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    photo.save(buffer, format="JPEG", exif=exif)
    dataset = Dataset.from_dict({"image": [{"bytes": buffer.getvalue(), "path": None}]}, Features(image=Image()))
    (row,) = prepare(dataset, dataset_columns={"images": "image"})
    assert row["images"][0].size == (20, 40)


def rows_of(*pictures, **columns):
    features = Features(image=Image(), q=Value("string"))
    return Dataset.from_dict({"image": list(pictures), "q": ["?"] * len(pictures)} | columns, features)


GOOD, TORN = encoded(picture()), {"bytes": encoded(picture())["bytes"][:400], "path": None}
BAD = {
    "missing column": (
        rows_of(GOOD), {"dataset_columns": {"prompt": "qq", "images": "image"}},
        "dataset of mine has no column 'qq'; did you mean 'q'?: it has image, q (dataset_columns: {prompt: qq})",
    ),
    "column of the template": (
        rows_of(GOOD), {"dataset_columns": {"prompt": "q"}, "prompt_template": "{question}?"},
        "has no column 'question'",
    ),
    "column of the filter": (rows_of(GOOD), {"dataset_filter": {"kind": 1}}, "has no column 'kind'"),
    "no picture": (
        rows_of(GOOD, None), {"dataset_columns": {"prompt": "q", "images": "image"}}, "has no image. Leave such",
    ),
    "broken bytes": (
        rows_of({"bytes": b"nothing", "path": None}), {"dataset_columns": {"images": "image"}},
        "column 'image' has a broken image: its bytes are not an image",
    ),
    "torn picture": (rows_of(TORN), {"dataset_columns": {"images": "image"}}, "column 'image' has a broken image: "),
    "missing file": (
        rows_of({"bytes": None, "path": "/nowhere/1.png"}), {"dataset_columns": {"images": "image"}},
        "has a broken image: [Errno 2]",
    ),
    "nothing left": (
        rows_of(GOOD), {"dataset_columns": {"images": "image"}, "image_max_size": 8},
        "dataset of mine has no rows left after image_max_size: 8. Filter out fewer rows",
    ),
    "empty prompt": (
        rows_of(GOOD, q=[None]), {"dataset_columns": {"prompt": "q", "images": "image"}},
        "column 'q', which is the prompt, is empty",
    ),
    "size of no picture": (
        rows_of(GOOD), {"dataset_columns": {"prompt": "q"}, "image_mode": "RGB"},
        "image_mode is for images, but dataset_columns does not name a column with images. Write: dataset_columns",
    ),
    "template without a prompt": (
        rows_of(GOOD), {"dataset_columns": {"images": "image"}, "prompt_template": "{q}"},
        "prompt_template makes the prompt, but dataset_columns has no `prompt`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_one_clear_error(name, prepare):
    dataset, keys, message = BAD[name]
    with pytest.raises(RecipeError) as caught:
        prepare(dataset, **keys)
    assert message in str(caught.value)


def test_a_row_that_is_refused_is_named():
    dataset = rows_of(GOOD, GOOD, TORN)
    made = prepare_dataset(dataset, DatasetArguments(dataset_columns={"prompt": "q", "images": "image"}), "of mine")
    assert len(made) == 3
    with pytest.raises(RecipeError, match="dataset of mine, row 2: column 'image' has a broken image"):
        made[2]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"dataset_columns": "prompt"},
            "dataset_columns must be `key: value` pairs, got 'prompt'. Write: dataset_columns: {prompt: ",
        ),
        ({"dataset_columns": {"prompt": 1}}, "the names of columns in dataset_columns must be strings, got 1"),
        ({"dataset_columns": {"image": "a", "images": "b"}}, "has both `image` and `images`, which name the same"),
        ({"dataset_filter": ["a"]}, "dataset_filter must be `key: value` pairs, got \\['a'\\]"),
        ({"dataset_limit": 0}, "dataset_limit must be an integer of at least 1, got 0"),
        ({"image_min_size": 9, "image_max_size": 8}, "image_min_size=9 is above image_max_size=8"),
        ({"image_resize": [3]}, "image_resize must be a width and a height, got \\[3\\]"),
        ({"image_mode": "RBG"}, "image_mode must be one of RGB, RGBA, L, got 'RBG'. Write: image_mode: RGB"),
    ],
)
def test_keys_that_cannot_be(keys, message):
    with pytest.raises(ValueError, match=message):
        DatasetArguments(**keys)


def test_mappings_come_from_the_command_line_too():
    assert DatasetArguments(dataset_columns='{"prompt": "q"}').dataset_columns == {"prompt": "q"}


def test_what_asks_for_nothing_changes_nothing():
    dataset = many()
    assert prepare_dataset(dataset, DatasetArguments(), "of mine") is dataset


def test_pictures_are_neither_copied_nor_opened_before_they_are_read(load, tmp_path, monkeypatch):
    dataset = load("lmms-lab/multimodal-open-r1-8k-verified", "train")
    written = {path: path.stat().st_size for path in tmp_path.rglob("*.arrow")}
    opened = []
    monkeypatch.setattr(pictures.ImageOps, "exif_transpose", lambda image: opened.append(image) or image)
    keys = DatasetArguments(dataset_columns=OPEN_R1, image_max_size=40, system_prompt="S", image_mode="RGB")
    made = prepare_dataset(dataset, keys, "of mine")
    new = sum(path.stat().st_size for path in tmp_path.rglob("*.arrow") if path not in written)
    assert new < min(written.values()) / 2
    assert opened == []
    made[0]
    assert len(opened) == 1
    assert made.select([1])[0]["images"][0].size == made[1]["images"][0].size


@pytest.mark.parametrize(
    ("size", "keys", "new"),
    [
        ((2000, 1000), {"image_max_pixels": 500_000}, (1000, 500)),
        ((30, 20), {"image_min_pixels": 2400}, (60, 40)),
        ((30, 20), {"image_min_pixels": 100, "image_max_pixels": 700}, (30, 20)),
        ((1, 4000), {"image_max_pixels": 100}, (1, 632)),
        ((30, 20), {"image_resize": [5, 6]}, (5, 6)),
    ],
)
def test_sizes(size, keys, new):
    assert new_size(size, DatasetArguments(**keys)) == new


def test_a_recipe_has_these_keys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {
        "model_name_or_path": "tiny:llava", "dataset_name": "org/data", "reward_funcs": ["math_answer_reward"],
        "dataset_columns": OPEN_R1, "dataset_filter": {"kind": ["a", "b"]}, "image_resize": [16, 24], "use_cpu": True,
        "precision": "fp32", "per_device_train_batch_size": 8,
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    extra = read_recipe("grpo", ["--config", "recipe.yaml", "--dataset_limit", "5"]).extra
    assert (extra.dataset_columns, extra.dataset_filter) == (OPEN_R1, {"kind": ["a", "b"]})
    assert (extra.image_resize, extra.dataset_limit) == ([16, 24], 5)


def test_no_row_is_looked_at_after_the_last_that_is_wanted():
    class Rows(list):
        def __contains__(self, value):
            looked_at.append(value)
            return super().__contains__(value)

    looked_at = []
    keys = DatasetArguments(dataset_filter={"kind": Rows([1])}, dataset_limit=2)
    made = prepare_dataset(Dataset.from_dict({"kind": [1, 0, 1, 0, 0, 1]}), keys, "of mine")
    assert (len(made), looked_at) == (2, [1, 0, 1])
