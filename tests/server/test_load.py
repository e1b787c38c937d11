"""Many at once, those who leave, those who wait too long, and an engine that dies."""

import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from live_server import wait_until
from scripted_engine import EOS

ASK = [{"role": "user", "content": "hi"}]


class Brake:
    """Holds steps up until it is let go."""

    def __init__(self) -> None:
        self.is_free = threading.Event()

    def __call__(self, plan) -> None:
        self.is_free.wait(0.02)


def is_idle(server) -> bool:
    cache = server.http.get("/cache").json()
    is_empty = all(group["num_held"] == 0 for group in cache["groups"])
    return cache["num_answers_in_flight"] == cache["num_running"] == cache["num_waiting"] == 0 and is_empty


@pytest.fixture
def slow(serve, ids):
    """Start a server that takes 20 ms for each of 400 tokens."""

    def start(**settings):
        return serve(lambda request: ids("x" * 400), engine={"before_step": Brake(), "max_num_seqs": 2}, **settings)

    return start


def test_a_client_that_leaves_a_stream_frees_all_at_once(slow):
    server = slow()
    stream = server.client().completions.create(model="tiny", prompt="abc", max_tokens=400, stream=True)
    next(stream)
    assert not is_idle(server)
    stream.close()
    wait_until(lambda: is_idle(server), 5)
    assert server.metric("hybrid_engine:requests_aborted_total") == 1


def test_a_client_that_leaves_while_it_waits_frees_all_at_once(slow):
    server = slow()
    with pytest.raises(openai.APITimeoutError):
        server.client(timeout=0.2).completions.create(model="tiny", prompt="abc", max_tokens=400)
    wait_until(lambda: is_idle(server), 5)


def test_who_finds_the_queue_full_is_told_when_to_come_again(slow):
    server = slow(max_queue=1)
    client = server.client()
    streams = [client.completions.create(model="tiny", prompt="abc", max_tokens=400, stream=True) for _ in range(3)]
    with pytest.raises(openai.RateLimitError, match="3 answers are in flight") as raised:
        client.completions.create(model="tiny", prompt="abc")
    assert int(raised.value.response.headers["retry-after"]) >= 1
    for stream in streams:
        stream.close()
    wait_until(lambda: server.service.num_in_flight == 0, 5)
    client.completions.create(model="tiny", prompt="abc", max_tokens=1)


@pytest.mark.parametrize(
    ("given", "priority"),
    [({"service_tier": "flex"}, 10), ({"service_tier": "priority"}, -10), ({"service_tier": "flex", "priority": 3}, 3)],
)
def test_a_class_of_service_is_a_priority_where_no_other_is_named(serve, given, priority):
    server = serve("hi", engine={"policy": "priority"})
    seen = []
    add = server.engine.add_requests
    server.engine.add_requests = lambda prompts: (seen.extend(each.priority for each in prompts), add(prompts))
    for route, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": ASK})):
        assert server.post(f"/v1/{route}", **body, **given).status_code == 200
    assert seen == [priority, priority]
    assert server.post("/v1/completions", prompt="a", service_tier="gold").status_code == 400


def test_no_more_answers_are_in_flight_than_the_concurrency_allows(slow):
    server = slow(max_concurrency=1)
    stream = server.client().completions.create(model="tiny", prompt="abc", max_tokens=400, stream=True)
    assert server.post("/v1/completions", prompt="abc").status_code == 429
    stream.close()


def test_a_server_that_is_to_end_lets_answers_end_first(slow):
    server = slow()
    stream = server.client().completions.create(model="tiny", prompt="abc", max_tokens=20, stream=True)
    next(stream)
    server.stop()
    assert 1 + len(list(stream)) == 20
    with pytest.raises(openai.APIConnectionError):
        server.client().completions.create(model="tiny", prompt="abc")


def test_a_request_that_takes_too_long_ends(slow):
    server = slow(request_timeout_seconds=5)
    body = {"prompt": "abc", "max_tokens": 400, "timeout_seconds": 0.1}
    response = server.post("/v1/completions", **body)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert is_idle(server)


def test_a_stream_that_takes_too_long_ends_with_the_error(slow):
    server = slow(request_timeout_seconds=0.2)
    stream = server.client().completions.create(model="tiny", prompt="abc", max_tokens=400, stream=True)
    with pytest.raises(openai.APIError, match=r"after 0\.2 seconds"):
        list(stream)
    wait_until(lambda: is_idle(server), 5)


def test_sixteen_clients_get_each_their_own_answer(serve):
    server = serve(lambda request: [*request.token_ids[:8] * 3, EOS], engine={"num_blocks": 48})
    client = server.client()
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        prompt = f"code{number:04}" + "." * (number % 5)
        stream = client.completions.create(model="tiny", prompt=prompt, max_tokens=50, stream=True)
        answers[number] = "".join(chunk.choices[0].text for chunk in stream)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == {number: f"code{number:04}" * 3 for number in range(16)}
    wait_until(lambda: is_idle(server), 5)


def test_an_engine_that_dies_tells_everybody_and_health_is_red(serve, ids):
    num_steps = 0

    def fail(plan) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            raise MemoryError("no more of it")

    server = serve(lambda request: ids("x" * 50), engine={"before_step": fail})
    deaths = []
    server.service.engine.on_death = deaths.append
    assert server.http.get("/health").status_code == 200
    stream = server.client().completions.create(model="tiny", prompt="abc", max_tokens=50, stream=True)
    with pytest.raises(openai.APIError, match="no more of it"):
        list(stream)
    assert server.http.get("/health").status_code == 503
    assert server.post("/v1/completions", prompt="abc").status_code == 503
    assert len(deaths) == 1


def test_who_asks_for_more_answers_than_ever_fit_is_refused(slow):
    server = slow(max_queue=1)
    response = server.post("/v1/completions", prompt="abc", n=4)
    assert response.status_code == 400
    assert "at most 3 fit" in response.json()["error"]["message"]


def test_what_is_cached_is_shown_and_forgotten(serve):
    server = serve("hi")
    prompt = "a prompt that is cached and forgotten"
    server.post("/v1/completions", prompt=prompt)
    groups = server.http.get("/cache").json()["groups"]
    assert [(group["kind"], group["reach"]) for group in groups] == [("full", None), ("window", 8)]
    assert groups[0]["cached_bytes"] == groups[0]["num_cached"] * groups[0]["block_bytes"] > 0
    assert server.http.post("/cache/reset").status_code == 200
    assert [group["num_cached"] for group in server.http.get("/cache").json()["groups"]] == [0, 0]


def test_metrics_have_the_names_that_dashboards_know(serve):
    server = serve("hello")
    for _ in range(2):
        server.post("/v1/completions", prompt="the same prompt, twice")
    assert server.metric("vllm:prompt_tokens_total") == 44
    assert server.metric("vllm:generation_tokens_total") == 12
    assert server.metric("vllm:prefix_cache_queries_total") == 44
    assert server.metric("vllm:prefix_cache_hits_total") == 20
    assert (
        server.metric('hybrid_engine:cache_missed_tokens_total{engine="0",model_name="tiny",reason="never_seen"}') == 21
    )
    assert server.metric('vllm:request_success_total{engine="0",finished_reason="stop"') == 2
    assert server.metric("vllm:time_to_first_token_seconds_count") == 2
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("hybrid_engine:answers_in_flight") == 0


def test_tokens_of_texts_and_texts_of_tokens(hello, ids):
    found = hello.post("/tokenize", prompt="abc", return_token_strs=True).json()
    assert (found["tokens"], found["count"], found["token_strs"]) == (ids("abc"), 3, ["a", "b", "c"])
    assert hello.post("/detokenize", tokens=ids("abc")).json() == {"prompt": "abc"}
    rendered = hello.post("/tokenize", messages=[{"role": "user", "content": "a"}]).json()
    assert rendered["tokens"] == ids("<user>a</user><assistant>")
    assert hello.post("/detokenize", tokens=[-1]).status_code == 400
    assert hello.post("/tokenize").status_code == 400


def test_a_lower_priority_goes_first_where_the_policy_says_so(serve, ids):
    asked: list[int] = []

    def script(request):
        asked.append(request.token_ids[0])
        return [*ids("hello"), EOS]

    stepping, may_step = threading.Event(), threading.Event()
    held = {"before_step": lambda plan: (stepping.set(), may_step.wait(20))}
    server = serve(script, engine={"max_num_seqs": 1, "policy": "priority"} | held)
    with ThreadPoolExecutor() as pool:
        pool.submit(server.post, "/v1/completions", prompt="3", priority=3)
        assert stepping.wait(20)
        for number in (2, 1):
            pool.submit(server.post, "/v1/completions", prompt=str(number), priority=number)
            wait_until(lambda number=number: len(server.service.engine._commands) == 3 - number, 20)
        may_step.set()
    # The first one runs already when the others come.
    assert list(dict.fromkeys(asked)) == ids("312")
