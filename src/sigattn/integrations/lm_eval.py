"""Evaluate language models with lm-evaluation-harness, by default on the paper's nine tasks (Table "lm_results").

Commands::

    sigattn lm-eval RUN                       # the nine tasks; needs access to the Hugging Face Hub for their data
    sigattn lm-eval RUN --tasks lambada_openai --limit 100
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sigattn.models.language import LanguageModel
from sigattn.optional import explain_import_errors

with explain_import_errors("eval"):
    from lm_eval import simple_evaluate, utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager

# task → number of examples in the prompt
PAPER = {
    "arc_easy": 0,
    "arc_challenge": 0,
    "hellaswag": 0,
    "piqa": 0,
    "sciq": 0,
    "winogrande": 0,
    "lambada_openai": 0,
    "triviaqa": 1,
    "webqs": 1,
}
# the harness's names of the number of new tokens, the one that counts first
_MAX_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class SigattnLM(TemplateLM):
    """Adapter of a language model to the harness.

    Args:
        model: the model. tokenizer: of Hugging Face's ``tokenizers``; None for bytes.
        batch_size: sequences at a time.
        end_token: token that ends a document, and that replaces an empty context; None if there is none: token 0 then
            replaces an empty context.
    """

    batch_size: int
    end_token: int | None
    model: LanguageModel
    tokenizer: Any

    def __init__(
        self, model: LanguageModel, tokenizer: Any = None, batch_size: int = 8, end_token: int | None = None
    ) -> None:
        super().__init__()
        self.model, self.tokenizer, self.batch_size, self.end_token = model.eval(), tokenizer, batch_size, end_token

    @property
    def eot_token_id(self) -> int:
        """Token that replaces an empty context: the one that ends a document, if there is one."""
        return self.end_token or 0

    @property
    def max_length(self) -> int:
        """Length of the model's context."""
        return self.model.config.max_seq_len

    @property
    def tokenizer_name(self) -> str:
        """Kind of tokenizer, for the harness's records."""
        return "bytes" if self.tokenizer is None else "tokenizers"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text."""
        if self.tokenizer is None:
            return list(string.encode())
        return list(self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens)).ids)

    def tok_decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        if self.tokenizer is None:
            return bytes(tokens).decode(errors="replace")
        return str(self.tokenizer.decode(list(tokens)))

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Return Σ log p of each continuation, and True if greedy decoding gives it."""
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        results: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            rows = [self._row(requests[i][1], requests[i][2]) for i in batch]
            log_p = self._log_probabilities([tokens for tokens, _ in rows])
            for i, (tokens, count), row in zip(batch, rows, log_p, strict=True):
                last = len(tokens) - 1
                targets = torch.tensor(tokens[last + 1 - count :], device=row.device)
                predictions = row[last - count : last]  # the log-probabilities before each target
                greedy = bool((predictions.argmax(-1) == targets).all())
                results[i] = predictions.gather(1, targets[:, None]).sum().item(), greedy
        return [results[i] for i in range(len(requests))]

    def _row(self, context: list[int], continuation: list[int]) -> tuple[list[int], int]:
        """Return the last tokens that fit in the context, and the length of the continuation, which must fit whole."""
        if len(continuation) > self.max_length:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens does not fit in a context of {self.max_length}"
            )
        return [*context, *continuation][-(self.max_length + 1) :], len(continuation)

    @torch.no_grad()
    def _log_probabilities(self, rows: list[list[int]]) -> Tensor:  # (B, N, vocabulary)
        """Return the log-probabilities of the tokens after the first of each row; the batch is padded on the right."""
        device = next(self.model.parameters()).device
        longest = max(len(r) for r in rows) - 1
        tokens = torch.tensor([r[:-1] + [0] * (longest + 1 - len(r)) for r in rows], device=device)
        return F.log_softmax(self.model(tokens).float(), -1)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return Σ log p of whole texts, in windows that predict each token once."""
        sums = []
        for request in requests:
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.eot_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(None, *utils.make_disjoint_window(w)) for w in windows]
            sums.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return continuations, greedy unless a task requests sampling, cut before the first stop text."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        until, max_tokens, sampling = _generation_options(options)
        # a prompt keeps at least half of the context, and the continuation gets what it leaves
        num_prompt_tokens = max(self.max_length - max_tokens, -(-self.max_length // 2))
        tokens = (self.tok_encode(context) or [self.eot_token_id])[-num_prompt_tokens:]
        max_tokens = min(max_tokens, self.max_length - len(tokens))
        ends = [] if self.end_token is None else [self.end_token]
        prompt = torch.tensor(tokens, device=next(self.model.parameters()).device)
        generated: list[int] = []
        while len(generated) < max_tokens:  # 32 tokens at a time, to stop soon after a stop text
            step = min(32, max_tokens - len(generated))
            so_far = torch.cat((prompt, prompt.new_tensor(generated)))
            (row,) = self.model.generate([so_far], step, stop_tokens=ends, **sampling)
            generated += row[len(so_far) :].tolist()
            text = self.tok_decode(generated)
            if self.end_token in generated or any(u in text for u in until if u):
                break
        if self.end_token in generated:
            generated = generated[: generated.index(self.end_token)]
        text = self.tok_decode(generated)
        for u in until:
            text = text.split(u)[0] if u else text
        return text


def _generation_options(options: dict[str, Any]) -> tuple[list[str], int, dict[str, Any]]:
    """Return stop texts, number of new tokens and arguments of ``generate`` for a task's ``generation_kwargs``."""
    rest = dict(options)
    until = rest.pop("until", None) or []
    limits = [rest.pop(name, None) for name in _MAX_NEW_TOKENS]
    max_tokens = next((int(n) for n in limits if n is not None), 256)
    temperature = float(rest.pop("temperature", None) or 0.0)
    if rest.pop("do_sample", None) is False:
        temperature = 0.0
    limited = {name: rest.pop(name, None) or None for name in ("top_k", "top_p")}
    if rest.get("num_beams") == 1:
        del rest["num_beams"]
    if unsupported := [f"{name}={value!r}" for name, value in rest.items() if value is not None]:
        raise ValueError(f"SigattnLM does not support the task's generation_kwargs {', '.join(unsupported)}")
    sampling = {"temperature": temperature, **(limited if temperature else {})}
    return [until] if isinstance(until, str) else list(until), max_tokens, sampling


def evaluate(
    lm: SigattnLM, tasks: Sequence[str] = (), *, include: Path | None = None, limit: int | None = None
) -> dict[str, dict[str, float]]:
    """Return the metrics of each task.

    Args:
        lm: the model. tasks: names of tasks; empty for the paper's nine. limit: number of samples of each task.
        include: folder of further tasks (YAML). The harness runs the Python code that a task names with ``!function``:
            include only folders that you trust.

    Raises:
        ValueError: for an unknown task.
        NotADirectoryError: if include is not a folder, which the harness would ignore.
    """
    if include is not None and not include.is_dir():
        raise NotADirectoryError(f"evaluate: include={str(include)!r} is not a folder")
    manager = TaskManager(include_path=None if include is None else str(include))
    unknown = [t for t in tasks if t not in manager.all_tasks]
    if unknown:
        raise ValueError(f"lm-evaluation-harness has no task {', '.join(unknown)}")
    metrics: dict[str, dict[str, float]] = {}
    for shots in (0, 1):
        # tasks that are not the paper's keep the number of examples of their own definition
        chosen = [t for t in (tasks or PAPER) if PAPER.get(t, 0) == shots]
        if not chosen:
            continue
        named: Any = {"num_fewshot": 1} if shots else {}
        report: Any = simple_evaluate(
            model=lm, tasks=chosen, task_manager=manager, limit=limit, log_samples=False, **named
        )
        for task, values in report["results"].items():
            numbers = {k.removesuffix(",none"): float(v) for k, v in values.items() if isinstance(v, (int, float))}
            metrics[task] = numbers
    return metrics
