"""Rewards for mathematics: what a completion answers, and whether it is right, in the forms that models write."""

import string
import subprocess
import sys
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safe_trainers import RecipeError
from safe_trainers.rewards.math_answer import final_answer, quantity, same_answer
from safe_trainers.rewards.registry import (
    NEEDS_MATH_VERIFY,
    REWARDS,
    TRL_REWARDS,
    import_reward,
    math_answer_reward,
    missing_for_reward,
    needed_columns,
    think_answer_format_reward,
    think_boxed_format_reward,
)


SAME = [
    (r"\$5", "5"),
    (r"\$1,200.50", "$1200.50$"),
    # letters of choices
    ("A", "A"), ("(A)", "A"), ("a", "A"), ("A.", "(A)"), (r"\text{A}", "A"), ("Option B", "B"), ("B. 12 cm", "B"),
    # numbers and units
    ("12 cm", "12"), ("12", "12 cm"), ("12.0", "12"), ("1,200", "1200"), ("$1,200$", "1200"), ("$5", "5"),
    ("−3", "-3"),
    ("50%", "50"), (r"50\%", "50%"), ("90°", "90"), (r"90^\circ", "90"), ("90 degrees", "90"), ("x = 5", "5"),
    (r"5 \text{ cm}^2", "5 cm^{2}"), ("1e3", "1000"), ("40 km/h", "40 km / h"),
    # decimal numbers to the digits of the right one
    ("1.23", "1.2"), ("0.333", "0.33"), ("2/3", "0.67"),
    # LaTeX, as geometry3k writes it
    (r"\frac{1}{2}", "0.5"), ("1/2", r"\frac12"), (r"\dfrac{5\sqrt{2}}{2}", r"\frac { 5 \sqrt 2 } { 2 }"),
    (r"2\sqrt{221}", r"2 \sqrt { 221 }"), (r"6\sqrt3", r"6 \sqrt { 3 }"), (r"\sqrt[3]{8}", "2"), (r"3\pi", r"3 \pi"),
    (r"3 \cdot 4", "12"), ("2^{3}", "8"), (r"\frac{8}{17}", "8/17"), (r"\left(3, 4\right)", "(3,4)"),
    # texts
    ("Yes.", "yes"), ("Tuesday", "tuesday"), ("5:12", "5:12"),
]  # fmt: skip
DIFFERENT = [
    ("B", "A"), ("A triangle", "A"), ("", "A"), ("", "5"), ("12", "13"), ("5 m", "5 cm"), ("1.26", "1.2"),
    ("1.25", "1"),
    ("12 13", "12"), ("50", "0.5"), ("0.33", r"\frac{1}{3}"), ("29.73", r"2 \sqrt{221}"), ("x+1", "1+x"), ("two", "2"),
    (r"\sqrt{2", "1.4142"), ("2(", "2"), ("1.5.3", "1.5"), ("1/0", "1"), ("9^9^9^9", "1"), ("(" * 300 + "1", "1"),
    ("nan", "5"), ("inf", "5"), ("1" * 400, "1"), ("[3]2", "6 "), ("sqrt", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("given_answer", "right"), SAME)
def test_answers_that_say_the_same(given_answer, right):
    assert same_answer(given_answer, right)


@pytest.mark.parametrize(("given_answer", "right"), DIFFERENT)
def test_answers_that_do_not(given_answer, right):
    assert not same_answer(given_answer, right)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<think>5</think><answer>6</answer>", "6"),
        ("<think>\nit is <answer>5</answer>\n</think>\n\n<answer>\n6.0\n</answer>", "6.0"),
        (r"<think>\boxed{7}</think> So it is \boxed{\frac{1}{2}}, done.", r"\frac{1}{2}"),
        (r"<answer>\boxed{3}</answer>", "3"),
        (r"\boxed{1}, or \boxed{2", "1"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<REASONING>r</REASONING><SOLUTION>4.0</SOLUTION>", "4.0"),
        ("We add them.\nThe answer is 7.", "7."),
        ("Answer: (B)", "(B)"),
        ("  42 ", "42"),
        ("", ""),
        ("<think>the answer is 3", "3"),
    ],
)
def test_the_final_answer_of_a_completion(completion, answer):
    assert final_answer(completion) == answer


def test_a_letter_names_a_choice_where_the_choices_are_known():
    choices = ["20", "145"]
    assert same_answer("B", "145", choices)
    assert same_answer("(B) 145", "145", choices)
    assert same_answer("145", "145", choices)
    assert not same_answer("A", "145", choices)
    assert not same_answer("C", "145", choices)


@given(numerator=st.integers(-999, 999), denominator=st.integers(1, 999))
def test_a_fraction_is_its_number_however_it_is_written(numerator, denominator):
    latex, plain = rf"$\frac{{{numerator}}}{{{denominator}}}$", f"{numerator}/{denominator}"
    assert quantity(latex)[0] == quantity(plain)[0] == numerator / denominator
    assert same_answer(f"{numerator / denominator!r}", latex) or abs(numerator / denominator) < 1e-9


@settings(max_examples=300)
@given(st.text(string.ascii_letters + string.digits + r"\{}()[]^*/+-.,$% <>", max_size=60))
def test_no_text_breaks_the_comparison(text):
    assert same_answer(text, "5") in (True, False)
    assert math_answer_reward([text], ["5"])[0] in (0.0, 1.0)


def test_the_reward_reads_texts_conversations_and_worked_solutions():
    message = [{"role": "assistant", "content": "<think>t</think>\n<answer>B</answer>"}]
    worked = "<think>Let me see.</think>\n\n<answer>B</answer>"
    assert math_answer_reward([message, "<answer>C</answer>", "x"], [worked, worked, None]) == [1.0, 0.0, None]
    assert math_answer_reward(["<answer>A</answer>"], ["20"], choices=[["20", "145"]], prompts=["?"]) == [1.0]


def test_a_solution_is_needed_for_each_completion():
    with pytest.raises(ValueError, match="shorter"):
        math_answer_reward(["1", "2"], ["1"])


@pytest.mark.parametrize(
    ("text", "answered", "boxed"),
    [
        ("<think>\nr\n</think>\n<answer>\n1\n</answer>", 1, 0),
        ("<think>r</think><answer>1</answer>", 1, 0),
        (r"<think>r</think> It is \boxed{\frac{1}{2}}.", 0, 1),
        ("<think>r<think></think><answer>1</answer>", 0, 0),
        ("<think>r</think><answer>1</answer> and more", 0, 0),
        ("<answer>1</answer>", 0, 0),
        (r"\boxed{1}", 0, 0),
        ("", 0, 0),
    ],
)
def test_formats(text, answered, boxed):
    assert think_answer_format_reward([text], solution=["1"]) == [answered]
    assert think_boxed_format_reward([text], solution=["1"]) == [boxed]


def test_rewards_are_found_by_name_and_named_where_one_is_misspelt():
    for name, reward in REWARDS.items():
        assert import_reward(name) is reward
    with pytest.raises(RecipeError, match="did you mean 'math_answer_reward'\\?"):
        import_reward("math_answer")


def test_the_names_of_trls_command_line_are_found():
    from trl.scripts.grpo import GRPOScriptArguments

    described = GRPOScriptArguments.__dataclass_fields__["reward_funcs"].metadata["help"]
    assert all(f"`{name}`" in described for name in TRL_REWARDS)
    punish = import_reward("get_soft_overlong_punishment")
    assert punish(completion_ids=[[1] * 10, [1] * 1200, [1] * 2000]) == [0.0, pytest.approx(-0.6875), -1.0]


def test_the_rewards_need_neither_torch_nor_another_package():
    code = (
        "import sys; from safe_trainers.rewards.registry import import_reward\n"
        "assert import_reward('math_answer_reward')(['<answer>1</answer>'], ['1']) == [1.0]\n"
        "print(*sorted(set(sys.modules) & {'torch', 'trl', 'transformers', 'sympy', 'math_verify'}))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []
    )


def answers(completions, answer, *, level=None, **kwargs):
    """A reward that needs a column."""
    return [0.0] * len(completions)


def test_a_reward_needs_the_columns_that_trl_does_not_pass():
    assert needed_columns(answers) == ["answer"]
    assert needed_columns(math_answer_reward) == ["solution"]
    assert needed_columns(partial(answers, answer="5")) == []
    assert needed_columns(think_answer_format_reward) == []
    assert needed_columns(lambda prompts, completions, completion_ids, trainer_state, **kwargs: []) == []


@pytest.mark.parametrize("name", [*REWARDS, *TRL_REWARDS])
def test_the_columns_of_rewards_that_are_named_are_those_of_their_functions(name):
    if name in NEEDS_MATH_VERIFY:
        pytest.importorskip("math_verify")
    assert needed_columns(name) == needed_columns(import_reward(name))


@pytest.mark.parametrize(("columns", "there", "asked", "removes", "expected"), [
    (["prompt", "answer"], None, None, False,
     "reward r needs the column 'solution', and the run has only prompt, answer. "
     "Write: dataset_columns: {prompt: prompt, solution: answer}"),
    (["prompt"], ["question", "level", "solutions"], {"prompt": "question"}, False,
     "reward r needs the column 'solution', and the run has only prompt. "
     "Write: dataset_columns: {prompt: question, solution: solutions}"),
    (["prompt"], None, None, False,
     "reward r needs the column 'solution', and the run has only prompt. Use a dataset with a column 'solution', or "
     "drop `r` from `reward_funcs`"),
    (["prompt", "solution"], None, None, True,
     "reward r needs the column 'solution', which remove_unused_columns removes. Write: remove_unused_columns: false"),
    (["prompt", "solution"], None, None, False, None),
])  # fmt: skip
def test_a_missing_column_of_a_reward_is_named_with_the_line_to_write(columns, there, asked, removes, expected):
    found = missing_for_reward("r", ["solution"], columns, there or columns, asked, removes)
    assert (found and found.line()) == expected


def test_a_parameter_that_trl_passes_in_the_plural_is_named():
    found = missing_for_reward("r", ["prompt"], ["prompt"], ["prompt"], None, False)
    assert (
        found.line()
        == "reward r needs the column 'prompt', which TRL passes as prompts. Rename its parameter to `prompts`"
    )
