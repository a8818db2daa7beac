"""Load as vLLM and SGLang print it."""

from headpond.engines.replicas.load import Load, read_load

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 12.0
vllm:num_requests_running{engine="1",model_name="policy"} 10.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="1",model_name="policy"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.75
vllm:num_preemptions_total{engine="0",model_name="policy"} 2.0
process_start_time_seconds 1.76e+09
"""
SGLANG = """\
sglang:num_running_reqs{model_name="policy",tp_rank="0"} 7.0
sglang:num_queue_reqs{model_name="policy",tp_rank="0"} 1.0
sglang:token_usage{model_name="policy",tp_rank="0"} 0.5
sglang:num_retracted_requests_total{model_name="policy"} 4.0
"""


def test_engines_behind_one_address_are_added_and_the_fullest_cache_counts() -> None:
    assert read_load(VLLM) == Load(running=22, waiting=3, cache_use=0.75, preemptions=2, started_at=1.76e9)


def test_sglang_has_other_names() -> None:
    assert read_load(SGLANG) == Load(running=7, waiting=1, cache_use=0.5, preemptions=4)


def test_a_page_without_a_queue_is_no_load() -> None:
    assert read_load("") is None
    assert read_load("vllm:num_requests_running 3\nprocess_cpu_seconds_total 1.5") is None


def test_values_that_are_no_numbers_are_left_out() -> None:
    lines = ("waiting 2", "waiting +Inf", "running ?", "running -Inf")
    page = "\n".join(["vllm:kv_cache_usage_perc NaN", *(f"vllm:num_requests_{line}" for line in lines)])
    assert read_load(page) == Load(running=0, waiting=2, cache_use=0.0, preemptions=0)
