import gc
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from hybrid_engine.errors import ChatTemplateError, EngineDeadError, RequestError
from hybrid_engine.llm import LLM
from hybrid_engine.outputs import OutputCollector
from hybrid_engine.sampling_params import SamplingParams

LONG = SamplingParams(max_tokens=64)
TEMPLATE = (
    "<bos>{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)


@pytest.fixture
def make_llm(scripted):
    def make(answer="hello", **options):
        template = options.pop("chat_template", None)
        return LLM.from_engine(scripted(answer, **options), SimpleNamespace(), chat_template=template)

    return make


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def held_blocks(llm):
    return sum(usage.num_held for usage in llm._engine.scheduler.coordinator.usage())


def echo(request):
    """A script that answers with the prompt's first two tokens."""
    return [*request.token_ids[:2], 1]


# threads


def test_several_threads_may_ask_one_model_at_once(make_llm):
    llm = make_llm(echo, max_num_seqs=4)
    prompts = [[f"{thread}{number} asks" for number in range(20)] for thread in range(4)]

    def ask(some: list[str]) -> list[str]:
        streamed = ["".join(delta.outputs[0].text for delta in llm.stream(prompt, LONG)) for prompt in some[:10]]
        return streamed + texts(llm.generate(some[10:], LONG))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, prompts)) == [[prompt[:2] for prompt in some] for some in prompts]
    assert held_blocks(llm) == 0


def test_a_stream_dropped_while_another_thread_steps_is_ended_by_that_thread(make_llm):
    stepping, may_step = threading.Event(), threading.Event()
    llm = make_llm("x" * 30, before_step=lambda plan: (stepping.set(), may_step.wait(30)))
    may_step.set()
    stream = llm.stream("dropped", LONG)
    next(stream)
    stepping.clear()
    may_step.clear()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(llm.generate, "other", LONG)
        assert stepping.wait(30)
        stream.close()  # returns at once, though a step runs
        may_step.set()
        assert texts(asked.result(30)) == ["x" * 30]
    assert held_blocks(llm) == 0


# generate


def test_generate_returns_outputs_in_the_order_of_the_prompts(make_llm):
    prompts = [f"{index:02} asks" for index in range(12)]
    assert texts(make_llm(echo, max_num_seqs=3).generate(prompts, LONG)) == [prompt[:2] for prompt in prompts]


def test_generate_takes_sampling_parameters_for_each_prompt(make_llm):
    outputs = make_llm().generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])
    assert texts(outputs) == ["h", "he"]


def test_generate_of_no_prompts_returns_none(make_llm):
    assert make_llm().generate([]) == []


def test_one_bad_prompt_leaves_the_others_unaccepted_and_the_llm_usable(make_llm):
    llm = make_llm()
    with pytest.raises(RequestError, match="prompt 1 of 3"):
        llm.generate(["a", "", "c"], LONG)
    assert texts(llm.generate("a", LONG)) == ["hello"]


def test_progress_is_shown_on_stderr_only_where_asked(make_llm, capsys):
    llm = make_llm()
    llm.generate("a", LONG)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], LONG, progress=True)
    captured = capsys.readouterr()
    assert "2/2" in captured.err
    assert captured.out == ""


def test_ctrl_c_lets_the_step_end_frees_everything_and_leaves_the_llm_usable(make_llm):
    steps = []

    def interrupt(plan):
        steps.append(plan.step_id)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    llm = make_llm(before_step=interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a question", "another"], LONG)
    assert held_blocks(llm) == 0
    assert texts(llm.generate("a question", LONG)) == ["hello"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failed_step_ends_generate_and_every_later_call(make_llm):
    def fail(plan):
        raise MemoryError("none left")

    llm = make_llm(before_step=fail)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="none left"):
            llm.generate("a", LONG)


# stream


def test_a_stream_joins_to_what_generate_returns(make_llm):
    llm = make_llm("a€b")
    collector = OutputCollector()
    for delta in llm.stream("q", LONG):
        collector.add(delta)
    streamed, generated = collector.output(), llm.generate("q", LONG)[0]
    assert streamed.outputs == generated.outputs
    assert streamed.finished


def test_a_bad_prompt_is_refused_when_the_stream_is_made(make_llm):
    with pytest.raises(RequestError, match="empty string"):
        make_llm().stream("")


@pytest.mark.parametrize("prompts", [["a", "b"], []], ids=["two", "none"])
def test_a_stream_of_other_than_one_prompt_is_refused(make_llm, prompts):
    with pytest.raises(RequestError, match=f"{len(prompts)} prompts were given, stream answers one"):
        make_llm().stream(prompts)


def test_closing_a_stream_aborts_its_request(make_llm):
    llm = make_llm()
    stream = llm.stream("a question", LONG)
    next(stream)
    assert held_blocks(llm) > 0
    stream.close()
    assert held_blocks(llm) == 0
    assert list(stream) == []


def test_a_stream_that_nobody_holds_any_more_is_aborted(make_llm):
    llm = make_llm()
    for _ in llm.stream("a question", LONG):
        break
    gc.collect()
    assert not llm._engine.has_unfinished_requests()


def test_streams_can_be_read_in_turns_and_generate_between_them(make_llm):
    llm = make_llm(echo)
    first, second = llm.stream("ab", LONG), llm.stream("cd", LONG)
    begun = [next(first).outputs[0].text, next(second).outputs[0].text]
    assert texts(llm.generate("ef", LONG)) == ["ef"]
    rest = ["".join(delta.outputs[0].text for delta in stream) for stream in (first, second)]
    assert (begun, rest) == (["a", "c"], ["b", "d"])


def test_ctrl_c_in_one_stream_loses_nothing_of_another(make_llm):
    def interrupt(plan):
        if plan.step_id == 1:
            os.kill(os.getpid(), signal.SIGINT)

    llm = make_llm(before_step=interrupt)
    other, mine = llm.stream("other", LONG), llm.stream("mine", LONG)
    next(mine)
    with pytest.raises(KeyboardInterrupt):
        next(mine)
    assert "".join(delta.outputs[0].text for delta in other) == "hello"


def test_a_second_ctrl_c_cuts_the_step_and_ends_the_engine(make_llm):
    def interrupt_twice(plan):
        for _ in range(2 if plan.step_id == 0 else 0):
            os.kill(os.getpid(), signal.SIGINT)

    llm = make_llm(before_step=interrupt_twice)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("q", LONG)
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        llm.generate("q", LONG)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_prompts_are_handed_over_leaves_none_behind(make_llm, monkeypatch):
    llm = make_llm()
    hand_over = llm._engine._hand_over

    def interrupted(caller, answers):
        hand_over(caller, answers)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._engine, "_hand_over", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], LONG)
    assert not llm._engine.has_unfinished_requests()


# chat


def test_chat_renders_the_template_with_one_begin_of_text_token(make_llm, ids):
    (output,) = make_llm(chat_template=TEMPLATE).chat([{"role": "user", "content": "hi"}], LONG)
    assert output.prompt == "<bos>user: hi\nbot:"
    assert output.prompt_token_ids == [0, *ids("user: hi\nbot:")]


def test_chat_answers_each_of_several_conversations(make_llm):
    conversations = [[{"role": "user", "content": word}] for word in ("one", "two")]
    assert texts(make_llm(chat_template=TEMPLATE).chat(conversations, LONG)) == ["hello", "hello"]


def test_chat_without_a_template_names_the_way_out(make_llm):
    with pytest.raises(ChatTemplateError, match="pass one as chat_template="):
        make_llm().chat([{"role": "user", "content": "hi"}])


def test_chat_takes_a_template_for_one_call(make_llm):
    (output,) = make_llm().chat([{"role": "user", "content": "hi"}], LONG, chat_template="{{ messages[0].content }}")
    assert output.prompt == "hi"


def test_a_template_that_refuses_the_messages_says_why(make_llm):
    with pytest.raises(ChatTemplateError, match="no tools"):
        make_llm(chat_template=TEMPLATE).chat([{"role": "tool", "content": "hi"}])


@pytest.mark.parametrize("messages", ["hi", None, ["hi"]], ids=["text", "none", "texts"])
def test_what_are_no_messages_is_refused(make_llm, messages):
    with pytest.raises(RequestError, match=r"messages is .*, must be a list like"):
        make_llm(chat_template=TEMPLATE).apply_chat_template(messages)


def test_reset_prefix_cache_reaches_the_engine(make_llm):
    llm = make_llm()
    for hit in (0, 8):
        assert llm.generate("0123456789", LONG)[0].num_cached_tokens == hit
    llm.reset_prefix_cache()
    assert llm.generate("0123456789", LONG)[0].num_cached_tokens == 0


# as_completed


def test_answers_come_as_soon_as_they_are_finished(make_llm):
    sampling = [SamplingParams(max_tokens=count) for count in (4, 1, 3)]
    completed = list(make_llm().as_completed(["a", "b", "c"], sampling))
    assert [index for index, _ in completed] == [1, 2, 0]
    assert texts(output for _, output in completed) == ["h", "hel", "hell"]


def test_closing_what_completes_aborts_the_rest(make_llm):
    llm = make_llm()
    completed = llm.as_completed(["a", "b"], [SamplingParams(max_tokens=1), LONG])
    next(completed)
    completed.close()
    assert held_blocks(llm) == 0
    assert not llm._engine.has_unfinished_requests()
