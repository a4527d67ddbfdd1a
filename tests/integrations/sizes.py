"""Sizes of small models of transformers."""

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SMALL, "vocab_size": 50, "max_position_embeddings": 64, "head_dim": 8, "num_key_value_heads": 2}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WHISPER = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "vocab_size": 50}
WHISPER |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8}
WHISPER |= {"max_source_positions": 10, "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 1}
WHISPER |= {"eos_token_id": 2, "decoder_start_token_id": 1}
