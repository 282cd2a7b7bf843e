import pytest

from server.client.files import CONFIG_FILE, WEIGHTS_FILE, Unreadable
from server.client.http import ApiRefused, ServerUnreachable
from server.client.progress import Watcher
from server.client.uploads import (
    DirectNotSupported,
    NotProvedYet,
    UploadFailed,
    UploadMemory,
)
from tests.server.fake_uploads import (
    Clock,
    FakeUploads,
    break_off,
    make_adapter,
    make_uploader,
    refusal,
)


class Diary(Watcher):
    def __init__(self):
        super().__init__()
        self.stages = []
        self.sizes = []

    def enter(self, stage):
        self.stages.append(stage)

    def sent(self, sent_bytes):
        self.sizes.append(sent_bytes)


@pytest.fixture
def server():
    return FakeUploads()


@pytest.fixture
def folder(tmp_path):
    return make_adapter(tmp_path / "adapter")


@pytest.fixture
def memory(tmp_path):
    return UploadMemory(tmp_path / "memory" / "file")


def break_off_after_it_counted(server, request):
    *_, upload_id, _, filename = request.url.path.split("/")
    server.put(upload_id, filename, request.headers["content-range"], request.read())
    raise break_off(server, request)


def someone_else_sent_it(server, request):
    *_, upload_id, _, filename = request.url.path.split("/")
    server.put(upload_id, filename, request.headers["content-range"], request.read())
    return None


def is_proving(server, request):
    upload_id = request.url.path.split("/")[3]
    server.uploads[upload_id]["state"] = "proving"
    answer = server.show(upload_id)
    answer.status_code, answer.headers["retry-after"] = 202, "5"
    return answer


def is_refused(server, request):
    fault = {"code": "rank_mismatch", "param": "r", "message": "A has rank 4, r says 5."}
    server.uploads[request.url.path.split("/")[3]] |= {"state": "failed", "error": fault}
    return refusal(400, "rank_mismatch", fault["message"])


# ---- through the gateway ----


def test_files_arrive_in_parts_and_whole(server, folder):
    diary = Diary()
    pushed = make_uploader(server).push("mine", folder, alias="prod", watcher=diary)
    assert (pushed.upload["version"]["version"], pushed.is_known) == (1, False)
    assert server.uploads["up_0"]["alias"] == "prod"
    assert server.num_calls("PUT", WEIGHTS_FILE) == 4
    assert diary.sizes == sorted(diary.sizes)
    assert diary.sizes[-1] == 39
    assert diary.stages == ["reading", "sending", "checking"]


def test_the_tokenizers_files_are_sent_after_the_adapters(server, folder):
    for name in ("tokenizer_config.json", "chat_template.jinja", "README.md"):
        (folder / name).write_bytes(b"x")
    make_uploader(server).push("mine", folder)
    paths = [path.rpartition("/")[2] for method, path in server.log if method == "PUT"]
    assert list(dict.fromkeys(paths)) == [
        CONFIG_FILE, WEIGHTS_FILE, "tokenizer_config.json", "chat_template.jinja"
    ]  # fmt: skip


def test_after_an_offset_mismatch_it_goes_on_from_where_the_server_stands(server, folder):
    clock = Clock()
    server.faults = [None, someone_else_sent_it]
    make_uploader(server, clock).push("mine", folder)
    assert server.uploads["up_0"]["state"] == "complete"
    assert clock.pauses == []


@pytest.mark.parametrize("fault", [break_off, break_off_after_it_counted])
def test_a_broken_connection_sends_nothing_twice_and_leaves_nothing_out(server, folder, fault):
    server.faults = [None, None, fault, None, fault]
    make_uploader(server).push("mine", folder)
    assert server.uploads["up_0"]["state"] == "complete"


def test_it_waits_as_long_as_the_server_asks_for(server, folder):
    clock = Clock()
    server.faults = [lambda *_: refusal(503, **{"retry-after": "3"})]
    make_uploader(server, clock).push("mine", folder)
    assert clock.pauses == [3.0]


def test_it_gives_up_after_a_bounded_number_of_failures(server, folder):
    clock = Clock()
    server.faults = [break_off] * 100
    with pytest.raises(ServerUnreachable, match="reset"):
        make_uploader(server, clock).push("mine", folder)
    assert server.num_calls("PUT", CONFIG_FILE) == 6
    assert clock.pauses == [1.0, 2.0, 4.0, 8.0, 10.0]


def test_offset_mismatches_without_end_are_given_up_too(server, folder):
    server.faults = [lambda *_: refusal(409, "upload_offset_mismatch")] * 100
    with pytest.raises(ApiRefused):
        make_uploader(server).push("mine", folder)


def test_a_refused_part_is_not_sent_again(server, folder):
    server.faults = [lambda *_: refusal(413, "too_large", "Too large.")]
    with pytest.raises(ApiRefused, match=r"Too large\.") as raised:
        make_uploader(server).push("mine", folder)
    assert (raised.value.status, raised.value.code, raised.value.param) == (413, "too_large", "p")
    assert server.num_calls("PUT", "") == 1


def test_a_file_that_is_gone_while_it_is_sent_is_one_sentence(server, folder):
    server.faults = [lambda *_: (folder / WEIGHTS_FILE).unlink()]
    with pytest.raises(Unreadable, match=rf"{WEIGHTS_FILE}: No such file"):
        make_uploader(server).push("mine", folder)


# ---- a later run ----


def interrupted_push(server, folder, memory):
    server.faults = [None, None, *[break_off] * 6]
    with pytest.raises(ServerUnreachable):
        make_uploader(server).push("mine", folder, memory=memory)
    server.faults = []


def test_a_later_push_goes_on_where_the_last_one_stopped(server, folder, memory):
    interrupted_push(server, folder, memory)
    server.log.clear()
    make_uploader(server).push("mine", folder, memory=memory)
    assert len(server.uploads) == 1
    assert server.num_calls("PUT", CONFIG_FILE) == 0
    assert server.num_calls("PUT", WEIGHTS_FILE) == 3
    make_uploader(server).push("mine", folder, memory=memory)
    assert len(server.uploads) == 2


@pytest.mark.parametrize("what", ["bytes", "name", "alias", "direct", "gone", "expired", "failed"])
def test_an_upload_that_is_over_or_of_something_else_is_not_gone_on_with(
    server, folder, memory, what
):
    interrupted_push(server, folder, memory)
    name, alias = "mine", None
    match what:
        case "bytes":
            make_adapter(folder, b"x" * 37)
        case "name":
            name = "other"
        case "alias":
            alias = "prod"
        case "gone":
            server.uploads = {"up_other": server.uploads["up_0"]}
        case "expired" | "failed":
            server.uploads["up_0"]["state"] = what
    make_uploader(server).push(name, folder, alias=alias, direct=what == "direct", memory=memory)
    assert len(server.uploads) == 2
    assert server.uploads["up_1"]["state"] == "complete"


def test_an_upload_that_waits_for_its_proof_is_waited_for_by_a_later_push(server, folder, memory):
    server.completions = [is_proving] * 100
    with pytest.raises(NotProvedYet, match="no engine has proved it within 20 s"):
        make_uploader(server, proof_wait_s=20.0).push("mine", folder, memory=memory)
    server.completions, diary = [], Diary()
    server.log.clear()
    make_uploader(server).push("mine", folder, memory=memory, watcher=diary)
    assert server.num_calls("PUT", "") == server.num_calls("POST", "/adapters/") == 0
    assert diary.stages == ["reading", "proving"]


def test_a_memory_that_cannot_be_written_keeps_nobody_from_pushing(server, folder, tmp_path):
    (tmp_path / "file").write_text("")
    memory = UploadMemory(tmp_path / "file" / "memory")
    assert make_uploader(server).push("mine", folder, memory=memory).upload["version"]


# ---- the end of an upload ----


def test_a_proof_is_waited_for_as_long_as_the_server_asks(server, folder):
    clock, diary = Clock(), Diary()
    server.completions = [is_proving, is_proving]
    pushed = make_uploader(server, clock).push("mine", folder, watcher=diary)
    assert pushed.upload["state"] == "complete"
    assert clock.pauses == [5.0, 5.0]
    assert diary.stages[-2:] == ["proving", "proving"]


def test_a_refused_adapter_is_one_sentence_with_its_code_and_has_a_report(server, folder, memory):
    server.completions = [is_refused]
    with pytest.raises(UploadFailed) as raised:
        make_uploader(server).push("mine", folder, memory=memory)
    assert str(raised.value) == ("The adapter is refused (rank_mismatch): A has rank 4, r says 5.")
    assert raised.value.upload["state"] == "failed"
    make_uploader(server).push("mine", folder, memory=memory)
    assert len(server.uploads) == 2


def test_a_completion_that_breaks_off_is_asked_for_again(server, folder):
    server.completions = [break_off, lambda *_: refusal(503, **{"retry-after": "5"})]
    assert make_uploader(server).push("mine", folder).upload["state"] == "complete"


def test_a_conflict_that_is_no_verdict_stays_what_it_is(server, folder):
    server.completions = [lambda *_: refusal(409, "upload_not_complete", "Send the rest.")]
    with pytest.raises(ApiRefused, match=r"Send the rest\."):
        make_uploader(server).push("mine", folder)


def test_bytes_that_the_server_has_are_not_sent_again(server, folder):
    server.known.add("mine")
    pushed = make_uploader(server).push("mine", folder)
    assert (pushed.upload["version"]["version"], pushed.is_known) == (1, True)
    assert server.num_calls("PUT", "") == 0


def test_a_store_that_takes_no_parts_is_said_in_the_users_words(server, folder):
    server.creations = [lambda *_: refusal(400, "presigned_not_supported", "Use the gateway.")]
    with pytest.raises(DirectNotSupported, match="leave out --direct"):
        make_uploader(server).push("mine", folder, direct=True)


# ---- quotas ----


def test_a_quota_is_waited_for_up_to_a_limit(server, folder):
    clock, diary = Clock(), Diary()
    full = lambda *_: refusal(429, "rate_limit_exceeded", **{"retry-after": "40"})  # noqa: E731
    server.creations = [full, full]
    make_uploader(server, clock, turn_wait_s=80.0).push("mine", folder, watcher=diary)
    assert clock.pauses == [40.0, 40.0]
    assert diary.stages[:3] == ["reading", "waiting", "waiting"]
    server.creations = [full, full, full]
    with pytest.raises(ApiRefused) as raised:
        make_uploader(server, clock, turn_wait_s=80.0).push("mine", folder)
    assert (raised.value.status, len(clock.pauses)) == (429, 4)


@pytest.mark.parametrize(
    "answer",
    [
        refusal(429, "quota_exceeded", **{"x-should-retry": "false"}),
        # The server may have made an upload nevertheless, and a second one would count, too.
        refusal(503, "storage_unavailable", **{"retry-after": "2"}),
    ],
)
def test_nothing_else_opens_an_upload_twice(server, folder, answer):
    clock = Clock()
    server.creations = [lambda *_: answer]
    with pytest.raises(ApiRefused):
        make_uploader(server, clock).push("mine", folder)
    assert clock.pauses == []
    assert server.num_calls("POST", "") == 1
