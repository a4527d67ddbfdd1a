"""Language models in lm-evaluation-harness, and the paper's nine tasks (Table "lm_results") by one call.

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
from sigattn.optional import needs

with needs("eval"):
    from lm_eval import simple_evaluate, utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager

# zero-shot but for the last two
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


class SigattnLM(TemplateLM):
    """A language model as the harness asks for one.

    Args:
        model: any. tokenizer: of Hugging Face's ``tokenizers``; None for bytes.
        batch: sequences at a time. end: number of the token that ends a document, from which empty contexts start.
    """

    def __init__(self, model: LanguageModel, tokenizer: Any = None, batch: int = 8, end: int = 0) -> None:
        super().__init__()
        self.model, self.tokenizer, self.batch, self.end = model.eval(), tokenizer, batch, end

    @property
    def eot_token_id(self) -> int:
        """Of the token that ends a document."""
        return self.end

    @property
    def max_length(self) -> int:
        """The model's context."""
        return self.model.config.context

    @property
    def tokenizer_name(self) -> str:
        """For the harness's records."""
        return "bytes" if self.tokenizer is None else "tokenizers"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokens of a text."""
        if self.tokenizer is None:
            return list(string.encode())
        return list(self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens)).ids)

    def tok_decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        if self.tokenizer is None:
            return bytes(tokens).decode(errors="replace")
        return str(self.tokenizer.decode(list(tokens)))

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Σ log p of each continuation, and whether it is what greedy choice gives."""
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        found: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(order), self.batch):
            chosen = order[start : start + self.batch]
            rows = [self._row(requests[i][1], requests[i][2]) for i in chosen]
            log_p = self._log_probabilities([tokens for tokens, _ in rows])
            for i, (tokens, count), row in zip(chosen, rows, log_p, strict=True):
                last = len(tokens) - 1
                wanted = torch.tensor(tokens[last + 1 - count :], device=row.device)
                own = row[last - count : last]  # the logits before each wanted token
                greedy = bool((own.argmax(-1) == wanted).all())
                found[i] = own.gather(1, wanted[:, None]).sum().item(), greedy
        return [found[i] for i in range(len(requests))]

    def _row(self, context: list[int], continuation: list[int]) -> tuple[list[int], int]:
        """The last tokens that fit, and how many of them are the continuation's (all of it, as the harness has it)."""
        if len(continuation) > self.max_length:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens does not fit in a context of {self.max_length}"
            )
        return [*context, *continuation][-(self.max_length + 1) :], len(continuation)

    @torch.no_grad()
    def _log_probabilities(self, rows: list[list[int]]) -> Tensor:  # (B, N, vocabulary)
        """Padded on the right, where a causal model does not look; the last token of a row predicts nothing wanted."""
        device = next(self.model.parameters()).device
        longest = max(len(r) for r in rows) - 1
        tokens = torch.tensor([r[:-1] + [0] * (longest + 1 - len(r)) for r in rows], device=device)
        return F.log_softmax(self.model(tokens).float(), -1)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Σ log p of whole texts, in windows each token of which is predicted once."""
        sums = []
        for request in requests:
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.end,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(None, *utils.make_disjoint_window(w)) for w in windows]
            sums.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations (or sampled, where a task asks for it), cut where one of its stop texts begins."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        most = int(options.get("max_gen_toks", 256))
        temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
        tokens = (self.tok_encode(context) or [self.end])[-max(1, self.max_length - most) :]
        prompt = torch.tensor(tokens, device=next(self.model.parameters()).device)
        made: list[int] = []
        while len(made) < most:  # in short runs, to see whether a stop text has come
            step = min(32, most - len(made))
            so_far = torch.cat((prompt, prompt.new_tensor(made)))[-self.max_length :]
            (row,) = self.model.generate([so_far], step, temperature=temperature, stop=[self.end])
            made += row[len(so_far) :].tolist()
            text = self.tok_decode(made)
            if self.end in made or any(u in text for u in until if u):
                break
        if self.end in made:
            made = made[: made.index(self.end)]
        text = self.tok_decode(made)
        for u in until:
            text = text.split(u)[0] if u else text
        return text


def evaluate(
    lm: SigattnLM, tasks: Sequence[str] = (), *, include: Path | None = None, limit: int | None = None
) -> dict[str, dict[str, float]]:
    """Metrics of tasks, by name; without names, of the paper's nine.

    Args:
        lm: the model. tasks: names. limit: samples of each task.
        include: folder of further tasks (YAML). The harness runs the Python code that a task names with ``!function``:
            include only folders that you trust.

    Raises:
        ValueError: if there is no such task.
    """
    manager = TaskManager(include_path=None if include is None else str(include))
    unknown = [t for t in tasks if t not in manager.all_tasks]
    if unknown:
        raise ValueError(f"lm-evaluation-harness knows no task {', '.join(unknown)}")
    found: dict[str, dict[str, float]] = {}
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
            found[task] = numbers
    return found
