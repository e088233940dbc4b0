"""What telemetry counts equals what clients got, and Prometheus' text says the same."""

from __future__ import annotations

import random
import sys
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families
from toy import Call, Client, ToySession, limits, random_job, scheduler

from dflash_trt.decode.prometheus import PrometheusTelemetry
from dflash_trt.decode.request import DecodeStats
from dflash_trt.errors import ConfigError


def samples(telemetry: PrometheusTelemetry) -> dict[str, float]:
    """`name{label}` -> value."""
    found = {}
    for family in text_string_to_metric_families(telemetry.text().decode()):
        for sample in family.samples:
            labels = ",".join(f"{v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_counters_equal_the_counts_of_what_was_delivered() -> None:
    def on_step(call: Call) -> None:
        if len(session.calls) == 40:
            raise RuntimeError("lost")

    telemetry = PrometheusTelemetry(block=4)
    session = ToySession(limits(), on_step=on_step)
    running, client = scheduler(session, telemetry=telemetry), Client()
    rng = random.Random(11)
    all_stats: list[DecodeStats] = []
    for index in range(60):
        request = running.request(*random_job(rng))
        running.enqueue(request)
        client.jobs[request.request_id] = (request.prompt, request.params)
        all_stats.append(request.stats)
        if index % 9 == 0:
            running.cancel(index - 4)
        client.take(running.step())
    client.run(running)
    client.check()
    found = samples(telemetry)
    assert found["dflash_generated_tokens_total"] == sum(map(len, client.tokens.values()))
    assert found["dflash_requests_queued_total"] == 60
    assert found["dflash_prompt_tokens_total"] == sum(
        len(prompt) for prompt, _ in client.jobs.values()
    )
    assert found["dflash_first_token_seconds_count"] == sum(map(bool, client.tokens.values()))
    assert found["dflash_failed_steps_total"] == 1
    reasons = Counter(delta.finish_reason for delta in client.last.values())
    assert reasons["cancelled"]
    assert reasons["error"]
    assert {r: found[f"dflash_requests_finished_total{{{r}}}"] for r in reasons} == reasons
    for position in range(3):
        offered = sum(stats.offered[position] for stats in all_stats)
        accepted = sum(stats.accepted[position] for stats in all_stats)
        assert found[f"dflash_drafts_verified_total{{{position + 1}}}"] == offered
        assert found[f"dflash_drafts_accepted_total{{{position + 1}}}"] == accepted
    assert found["dflash_acceptance_length_count"] == sum(stats.steps for stats in all_stats)
    assert found["dflash_acceptance_length_sum"] == sum(stats.tokens for stats in all_stats)
    kinds = ("decode", "prefill")
    counts = {kind: found[f"dflash_step_seconds_count{{{kind}}}"] for kind in kinds}
    assert sum(counts.values()) == len(session.calls) - 1
    assert found["dflash_verify_width_count"] == counts["decode"]
    assert found["dflash_step_slots_sum{decode}"] == sum(stats.steps for stats in all_stats)
    assert found["dflash_queue_depth"] == found["dflash_slots_in_use"] == 0


def test_every_reason_is_there_before_its_first_event() -> None:
    found = samples(PrometheusTelemetry(block=4))
    for reason in ("stop", "length", "cancelled", "timeout", "shutdown", "error"):
        assert found[f"dflash_requests_finished_total{{{reason}}}"] == 0
    for kind in ("prefill", "decode"):
        assert found[f"dflash_step_seconds_count{{{kind}}}"] == 0


def test_load_is_told_while_it_lasts() -> None:
    telemetry = PrometheusTelemetry(block=4)
    running = scheduler(ToySession(limits(max_slots=2)), telemetry=telemetry)
    for _ in range(5):
        running.submit([1, 2], random_job(random.Random(1))[1])
    running.step()
    found = samples(telemetry)
    assert (found["dflash_queue_depth"], found["dflash_slots_in_use"]) == (3, 2)
    assert found["dflash_queue_seconds_count"] == 2


def test_two_engines_in_one_process_do_not_share_metrics() -> None:
    one, other = PrometheusTelemetry(block=2), PrometheusTelemetry(block=4)
    one.on_queued()
    assert samples(other)["dflash_requests_queued_total"] == 0


def test_a_missing_package_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match="prometheus_client") as caught:
        PrometheusTelemetry(block=4)
    assert "dflash-trt[metrics]" in caught.value.hint
