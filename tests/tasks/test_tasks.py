"""Each objective compared with its formula."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from sigattn.data.dataset import DataError
from sigattn.data.speech import CharTokenizer
from sigattn.models.language import LanguageModelConfig
from sigattn.models.speech import SpeechModelConfig
from sigattn.models.vision import ViTConfig
from sigattn.tasks.byol import BYOL
from sigattn.tasks.classification import Classification
from sigattn.tasks.ctc import CTC
from sigattn.tasks.language import LanguageModelling
from sigattn.tasks.mae import MaskedAutoencoding
from sigattn.tasks.simclr import SimCLR
from tests.models.test_models import MAE, VISION

SMALL = replace(VISION, drop_path=0.0)


@pytest.mark.parametrize("ignored", [-1, -100])
def test_language_modelling(ignored):
    """All targets below 0 are ignored; PyTorch's and transformers' default is -100."""
    task = LanguageModelling()
    model = task.build(LanguageModelConfig(vocab_size=7, max_seq_len=9, num_layers=1, embed_dim=16, num_heads=2))
    tokens, targets = torch.randint(7, (3, 9)), torch.randint(7, (3, 9))
    targets[0, 4:] = ignored
    probability = model(tokens).softmax(-1)
    picked = [probability[b, i, targets[b, i]] for b in range(3) for i in range(9) if targets[b, i] >= 0]
    expected = -torch.stack(picked).log().mean()
    torch.testing.assert_close(task.loss(model, (tokens, targets)), expected)
    halves = [(tokens[:1], targets[:1]), (tokens[1:], targets[1:])]  # of different numbers of tokens
    with torch.no_grad():
        found = task.evaluate(model, halves)
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert found["bits"] == pytest.approx(expected.item() / math.log(2), rel=1e-5)
    assert found["perplexity"] == pytest.approx(expected.exp().item(), rel=1e-5)
    right = [probability[b, i].argmax() == targets[b, i] for b in range(3) for i in range(9) if targets[b, i] >= 0]
    assert found["accuracy"] == pytest.approx(torch.stack(right).double().mean().item())
    assert task.loss(model, (tokens, torch.full_like(targets, ignored))).item() == 0


def test_documents_are_independent():
    """The loss of a packed row equals that of its documents one by one; end tokens predict nothing."""
    task = LanguageModelling(end_token=0)
    model = task.build(LanguageModelConfig(vocab_size=7, max_seq_len=9, num_layers=1, embed_dim=16, num_heads=2))
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


class TestClassification:
    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_loss(self, smoothing):
        task = Classification(label_smoothing=smoothing)
        model = task.build(SMALL)
        images, labels = torch.randn(6, 1, 8, 8), torch.randint(5, (6,))
        target = F.one_hot(labels, 5) * (1 - smoothing) + smoothing / 5
        expected = -(target * model(images).log_softmax(-1)).sum(-1).mean()
        torch.testing.assert_close(task.loss(model, (images, labels)), expected)

    def test_mixup_uses_one_share_for_images_and_targets(self):
        task = Classification(mixup=0.8)
        model = task.build(SMALL)
        images, labels = torch.randn(6, 1, 8, 8), torch.randint(5, (6,))
        torch.manual_seed(3)
        loss = task.loss(model, (images, labels))
        torch.manual_seed(3)
        share = torch.distributions.Beta(0.8, 0.8).sample()
        other = torch.randperm(6)
        target = share * F.one_hot(labels, 5) + (1 - share) * F.one_hot(labels[other], 5)
        mixed = share * images + (1 - share) * images[other]
        torch.testing.assert_close(loss, -(target * model(mixed).log_softmax(-1)).sum(-1).mean())

    def test_metrics(self):
        task = Classification()

        class Fixed(torch.nn.Module):
            def forward(self, images):
                return images

        logits = torch.eye(7)[[0, 1, 2, 3]] * 3 - torch.arange(7) / 10
        found = task.evaluate(Fixed(), [(logits[:3], torch.tensor([0, 2, 6])), (logits[3:], torch.tensor([3]))])
        assert found["top1"] == 0.5
        assert found["top5"] == 0.75
        expected = F.cross_entropy(logits, torch.tensor([0, 2, 6, 3])).item()
        assert found["loss"] == pytest.approx(expected)

    def test_too_few_classes_raise(self):
        with pytest.raises(ValueError, match="num_classes=0"):
            Classification().build(replace(SMALL, num_classes=0))


class TestSimCLR:
    task = SimCLR(temperature=0.5, projector_dim=12, output_dim=6)

    def test_loss_is_info_nce(self):
        module = self.task.build(SMALL)
        views = torch.randn(2, 4, 1, 8, 8)
        state = {n: t.clone() for n, t in module.state_dict().items()}
        loss = self.task.loss(module, tuple(views))
        module.load_state_dict(state)
        z = F.normalize(module(views.flatten(0, 1)), dim=-1)
        terms = []
        for i in range(8):
            similarity = (z[i] @ z.T / 0.5).exp()
            others = similarity.sum() - similarity[i]
            terms.append(-(similarity[(i + 4) % 8] / others).log())
        torch.testing.assert_close(loss, torch.stack(terms).mean())

    def test_metrics_and_backbone(self):
        module = self.task.build(SMALL).eval()
        image = torch.randn(4, 1, 8, 8)
        assert self.task.evaluate(module, [(image, image)])["retrieval"] == 1
        assert self.task.backbone(module)(image).shape == (4, 16)


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
        module = self.task.build(SMALL).eval()
        views = tuple(torch.randn(2, 200, 1, 8, 8))
        with torch.no_grad():
            assert self.task.evaluate(module.train(), [views])["spread"] > 0.5
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
        def said(text):
            path = [t for token in self.tokens(text) for t in (token, 0)]
            return 5 * F.one_hot(torch.tensor(path), 29).float()

        class Fixed(torch.nn.Module):
            def forward(self, frames, lengths):
                return frames.log_softmax(-1), lengths

        heard, meant = ["one two", "three"], ["one too", "three"]
        frames = torch.nn.utils.rnn.pad_sequence([said(t) for t in heard], batch_first=True)
        targets = [torch.tensor(self.tokens(t)) for t in meant]
        batch = (
            frames,
            torch.tensor([14, 10]),
            torch.nn.utils.rnn.pad_sequence(targets, batch_first=True),
            torch.tensor([len(t) for t in targets]),
        )
        found = self.task.evaluate(Fixed(), [batch])
        assert found["wer"] == pytest.approx(100 / 3)
        assert found["cer"] == pytest.approx(100 / 12)
        assert found["loss"] > 0

    def test_wrong_vocabulary_raises(self):
        with pytest.raises(ValueError, match="28 characters needs vocab_size=29, got 30"):
            self.task.build(SpeechModelConfig(vocab_size=30))
