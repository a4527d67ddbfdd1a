"""Each objective compared with its formula."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from sigattn.data import CharTokenizer, DataError
from sigattn.models import LanguageModel, LanguageModelConfig, SpeechModel, SpeechModelConfig, ViT, ViTConfig, saving
from sigattn.tasks import BYOL, CTC, Classification, Distillation, LanguageModelling, MaskedAutoencoding, SimCLR
from sigattn.validation import SettingsError
from tests.models.test_models import MAE, VISION

SMALL = replace(VISION, drop_path=0.0)
LANGUAGE = LanguageModelConfig(vocab_size=7, max_seq_len=9, num_layers=1, embed_dim=16, num_heads=2)


class Fixed(torch.nn.Module):
    def forward(self, *inputs):
        return inputs[0] if len(inputs) == 1 else inputs


@pytest.mark.parametrize("ignored", [-1, -100])
def test_language_modelling(ignored):
    """All targets below 0 are ignored; PyTorch's and transformers' default is -100."""
    task = LanguageModelling()
    model = task.build(LANGUAGE)
    tokens, targets = torch.randint(7, (3, 9)), torch.randint(7, (3, 9))
    targets[0, 4:] = ignored
    probability = model(tokens).softmax(-1)
    picked = [probability[b, i, targets[b, i]] for b in range(3) for i in range(9) if targets[b, i] >= 0]
    expected = -torch.stack(picked).log().mean()
    torch.testing.assert_close(task.loss(model, (tokens, targets)), expected)
    halves = [(tokens[:1], targets[:1]), (tokens[1:], targets[1:])]  # of different numbers of tokens
    with torch.no_grad():
        found = task.evaluate(model, halves)
    right = [probability[b, i].argmax() == targets[b, i] for b in range(3) for i in range(9) if targets[b, i] >= 0]
    accuracy = torch.stack(right).double().mean().item()
    loss = expected.item()
    metrics = {"loss": loss, "bits": loss / math.log(2), "perplexity": math.exp(loss), "accuracy": accuracy}
    assert found == pytest.approx(metrics, rel=1e-5)
    assert task.loss(model, (tokens, torch.full_like(targets, ignored))).item() == 0


@pytest.mark.parametrize("position", ["rope", "sincos", "alibi"])
def test_documents_are_independent(position):
    """The loss of a packed row equals that of its documents one by one; end tokens predict nothing."""
    task = LanguageModelling(end_token=0)
    model = task.build(replace(LANGUAGE, position=position))
    tokens = torch.tensor([[3, 1, 4, 0, 5, 2, 6, 0, 5]])
    targets = torch.tensor([[1, 4, 0, 5, 2, 6, 0, 5, 3]])
    nats = 0.0
    for part, predicting in ((slice(0, 4), 3), (slice(4, 8), 3), (slice(8, 9), 1)):
        logits = model(tokens[:, part])[0, :predicting]
        nats = nats + F.cross_entropy(logits, targets[0, part][:predicting], reduction="sum")
    torch.testing.assert_close(task.loss(model, (tokens, targets)), nats / 7)
    with torch.no_grad():
        assert task.evaluate(model, [(tokens, targets)])["loss"] == pytest.approx(nats.item() / 7, rel=1e-5)


def test_held_out_data_without_batches_is_an_error():
    for task in (LanguageModelling(), CTC(), BYOL()):
        with pytest.raises(DataError, match="no batches"):
            task.evaluate(torch.nn.Identity(), [])


@pytest.mark.parametrize(("smoothing", "mixup"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.8)])
def test_classification(smoothing, mixup):
    """Mixup uses one share for images and targets."""
    task = Classification(label_smoothing=smoothing, mixup=mixup)
    model = task.build(SMALL)
    images, labels = torch.randn(6, 1, 8, 8), torch.randint(5, (6,))
    torch.manual_seed(3)
    loss = task.loss(model, (images, labels))
    torch.manual_seed(3)
    target = F.one_hot(labels, 5) * (1 - smoothing) + smoothing / 5
    if mixup:
        share = torch.distributions.Beta(mixup, mixup).sample()
        other = torch.randperm(6)
        target, images = (share * x + (1 - share) * x[other] for x in (target, images))
    torch.testing.assert_close(loss, -(target * model(images).log_softmax(-1)).sum(-1).mean())


def test_metrics_of_classification():
    logits, labels = torch.eye(7)[[0, 1, 2, 3]] * 3 - torch.arange(7) / 10, torch.tensor([0, 2, 6, 3])
    found = Classification().evaluate(Fixed(), [(logits[:3], labels[:3]), (logits[3:], labels[3:])])
    assert found == pytest.approx({"top1": 0.5, "top5": 0.75, "loss": F.cross_entropy(logits, labels).item()})


def test_simclr():
    task = SimCLR(temperature=0.5, projector_dim=12, output_dim=6)
    module = task.build(SMALL)
    views = torch.randn(2, 4, 1, 8, 8)
    state = {n: t.clone() for n, t in module.state_dict().items()}
    loss = task.loss(module, tuple(views))
    module.load_state_dict(state)
    z = F.normalize(module(views.flatten(0, 1)), dim=-1)
    terms = []
    for i in range(8):
        similarity = (z[i] @ z.T / 0.5).exp()
        terms.append(-(similarity[(i + 4) % 8] / (similarity.sum() - similarity[i])).log())
    torch.testing.assert_close(loss, torch.stack(terms).mean())
    assert task.evaluate(module.eval(), [(views[0], views[0])])["retrieval"] == 1
    assert task.backbone(module)(views[0]).shape == (4, 16)


class TestBYOL:
    task = BYOL(projector_dim=12, output_dim=6, momentum=0.9, base_batch_size=4)

    def test_loss_over_pairs_of_different_views(self):
        module = self.task.build(SMALL).eval()
        views = tuple(torch.randn(3, 4, 1, 8, 8))
        predictions = [F.normalize(module.predictor(module.student(v)), dim=-1) for v in views]
        targets = [F.normalize(module.teacher(v), dim=-1) for v in views[:2]]
        pairs = [(0, 1), (1, 0), (2, 0), (2, 1)]
        expected = torch.stack([(predictions[i] - targets[j]).square().sum(-1).mean() for i, j in pairs]).mean()
        torch.testing.assert_close(self.task.loss(module, views), expected)

    def test_teacher_follows_the_student(self):
        module = self.task.build(SMALL)
        self.task.loss(module, tuple(torch.randn(2, 4, 1, 8, 8))).backward()
        assert all(p.grad is None and not p.requires_grad for p in module.teacher.parameters())
        with torch.no_grad():
            for p in module.student.parameters():
                p.add_(1.0)
        before = {n: t.clone() for n, t in module.teacher.state_dict().items()}
        self.task.after_step(module, samples=12)  # three times the base batch: momentum 0.9³
        student = module.student.state_dict()
        for name, slow in module.teacher.state_dict().items():
            if slow.is_floating_point():
                torch.testing.assert_close(slow, 0.729 * before[name] + 0.271 * student[name])
            else:
                assert torch.equal(slow, student[name])

    def test_spread_detects_collapse(self):
        module = self.task.build(SMALL)
        views = tuple(torch.randn(2, 200, 1, 8, 8))
        with torch.no_grad():
            assert self.task.evaluate(module, [views])["spread"] > 0.5
            module.teacher.projector[-1] = torch.nn.Identity()
            module.teacher.projector[-2].weight.zero_()
            assert self.task.evaluate(module, [views])["spread"] == 0


def test_masked_autoencoding_masks_the_same_patches_at_every_evaluation():
    task = MaskedAutoencoding()
    module = task.build(MAE)
    batch = (torch.randn(3, 1, 8, 8),)
    state = torch.get_rng_state()
    with torch.no_grad():
        assert task.evaluate(module, [batch]) == task.evaluate(module, [batch])
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(task.backbone(module).config, ViTConfig)


class TestCTC:
    task = CTC()
    tokens = CharTokenizer(task.alphabet)

    def test_text_and_tokens(self):
        assert self.task.text(self.tokens("It's  a Test!")) == "it's  a test"
        assert self.tokens("|") == [1]

    def test_greedy_decoding(self):
        #          blank |   a   a  blank a   b   b   |
        path = [0, 1, 3, 3, 0, 3, 4, 4, 1, 5]
        one_hot = F.one_hot(torch.tensor([path]), 29).float()
        assert self.task.decode(one_hot, torch.tensor([10])) == ["aab c"]
        assert self.task.decode(one_hot, torch.tensor([9])) == ["aab"]

    def test_error_rates(self):
        heard, meant = (list(map(self.tokens, texts)) for texts in (["one two", "three"], ["one too", "three"]))
        paths = [torch.tensor([t for token in tokens for t in (token, 0)]) for tokens in heard]
        pad, targets = torch.nn.utils.rnn.pad_sequence, [torch.tensor(tokens) for tokens in meant]
        frames = (5 * F.one_hot(pad(paths, batch_first=True), 29).float()).log_softmax(-1)
        batch = frames, torch.tensor([14, 10]), pad(targets, batch_first=True), torch.tensor([7, 5])
        found = self.task.evaluate(Fixed(), [batch])
        assert found["wer"] == pytest.approx(100 / 3)
        assert found["cer"] == pytest.approx(100 / 12)
        assert found["loss"] > 0


def kl(wanted, found):
    teacher, student = (torch.distributions.Categorical(logits=x.double()) for x in (wanted, found))
    return torch.distributions.kl_divergence(teacher, student)


class TestDistillation:
    """The loss is the task's plus the divergence from the teacher, for the inputs that the task gives."""

    @pytest.fixture
    def distilled(self, tmp_path):
        def make(teacher, task, weight=1.0):
            saving.save(teacher, tmp_path)
            return Distillation(task=task, teacher=str(tmp_path), weight=weight)

        return make

    def test_language_model(self, distilled):
        teacher, model = LanguageModel(LANGUAGE), LanguageModel(LANGUAGE)
        task = distilled(teacher, LanguageModelling(), 0.5)
        assert task.metric == "bits"
        assert isinstance(task.build(LANGUAGE), LanguageModel)
        tokens, targets = torch.randint(7, (2, 3, 9))
        loss = task.loss(model, (tokens, targets))
        wanted, found = teacher(tokens), model(tokens)
        expected = F.cross_entropy(found.flatten(0, 1), targets.flatten()) + 0.5 * kl(wanted, found).mean()
        torch.testing.assert_close(loss, expected.float())
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        assert not model._forward_hooks

    def test_documents_reach_the_teacher(self, distilled):
        teacher, model, task = LanguageModel(LANGUAGE), LanguageModel(LANGUAGE), LanguageModelling(end_token=0)
        tokens, targets = torch.randint(1, 7, (2, 3, 9))
        tokens[:, 5] = 0
        loss = distilled(teacher, task).loss(model, (tokens, targets)) - task.loss(model, (tokens, targets))
        logits = []
        for module in (teacher, model):
            module.register_forward_hook(lambda _, __, out: logits.append(out))
            task.loss(module, (tokens, targets))
        predicting = tokens != 0  # the first token of a document is not predicted
        torch.testing.assert_close(loss, kl(*logits)[predicting].mean().float(), rtol=1e-4, atol=1e-6)

    def test_mixed_images_reach_the_teacher(self, distilled):
        task, teacher, model = Classification(mixup=0.8), ViT(SMALL), ViT(SMALL)
        batch, seen = (torch.randn(4, 1, 8, 8), torch.arange(4)), []
        torch.manual_seed(5)
        loss = task.loss(model, batch)
        model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        torch.manual_seed(5)
        divergence = distilled(teacher, task).loss(model, batch) - loss
        assert not torch.equal(seen[0], batch[0])
        expected = kl(teacher(seen[0]), model(seen[0])).mean().float()
        torch.testing.assert_close(divergence, expected, rtol=1e-3, atol=1e-6)

    def test_padding_of_speech_does_not_count(self, distilled):
        config = SpeechModelConfig(num_layers=1, embed_dim=16, num_heads=2)
        teacher, model = SpeechModel(config).eval(), SpeechModel(config).eval()
        frames, lengths = torch.randn(2, 40, config.num_mel_bins), torch.tensor([40, 20])
        batch = frames, lengths, torch.ones(2, 3, dtype=torch.long), torch.tensor([3, 2])
        loss = distilled(teacher, CTC()).loss(model, batch) - CTC().loss(model, batch)
        (wanted, steps), (found, _) = teacher(frames, lengths), model(frames, lengths)
        each = [kl(wanted[b, :n], found[b, :n]).mean() for b, n in enumerate(steps.tolist())]
        torch.testing.assert_close(loss, torch.stack(each).mean().float(), rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_together_raises(tmp_path):
    with pytest.raises(ValueError, match="num_classes=0"):
        Classification().build(replace(SMALL, num_classes=0))
    with pytest.raises(ValueError, match="28 characters needs vocab_size=29, got 30"):
        CTC().build(SpeechModelConfig(vocab_size=30))
    with pytest.raises(SettingsError, match="predict distributions, not MaskedAutoencoding"):
        Distillation(task=MaskedAutoencoding(), teacher=str(tmp_path))
    with pytest.raises(SettingsError, match="weight must be"):
        Distillation(task=LanguageModelling(), teacher=str(tmp_path), weight=0.0)
    with pytest.raises(saving.ModelError):
        Distillation(task=LanguageModelling(), teacher=str(tmp_path / "nothing")).build(LANGUAGE)
