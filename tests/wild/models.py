"""Architectures of transformers, built small from their configurations."""

import torch

# What most configurations call their sizes; each model takes what it knows.
_SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA = {"num_heads": 8, "head_dim": 8, "state_size": 16, "expand": 2, "n_groups": 2, "chunk_size": 8}

# Class for a causal language model (or what comes nearest), and what its configuration needs besides.
MODELS = {
    "Llama": ("LlamaForCausalLM", {}),
    "Mistral": ("MistralForCausalLM", {}),
    "Gemma": ("GemmaForCausalLM", {}),
    "Gemma 2": ("Gemma2ForCausalLM", {}),
    "Gemma 3": ("Gemma3ForCausalLM", {}),
    "Gemma 4": (
        "Gemma4ForCausalLM",
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99, "global_head_dim": 8},
    ),
    "Qwen 3": ("Qwen3ForCausalLM", {}),
    "Qwen 3.5": ("Qwen3_5ForCausalLM", _LINEAR),
    "Qwen3-Next": ("Qwen3NextForCausalLM", {**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 16}),
    "OLMo 2": ("Olmo2ForCausalLM", {}),
    "T5": ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "Mamba 2": ("Mamba2ForCausalLM", _MAMBA),
    "Zamba 2": (
        "Zamba2ForCausalLM",
        {
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "num_mem_blocks": 1,
            "layers_block_type": ["mamba", "hybrid"],
            "chunk_size": 8,
            "adapter_rank": 4,
            "hybrid_layer_ids": [1],
            "attention_head_dim": 16,
        },
    ),
    "Nemotron-H": (
        "NemotronHForCausalLM",
        {
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 8,
            "layers_block_type": ["mamba", "attention"],
        },
    ),
    "Falcon-H1": (
        "FalconH1ForCausalLM",
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_chunk_size": 8,
            "mamba_rms_norm": True,
        },
    ),
    "DeepSeek V3": (
        "DeepseekV3ForCausalLM",
        {
            **_MLA,
            **_EXPERTS,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
    ),
    "DeepSeek V4": ("DeepseekV4ForCausalLM", {**_MLA, **_EXPERTS, "n_routed_experts": 4}),
    "gpt-oss": ("GptOssForCausalLM", _EXPERTS),
    "Phi 3": ("Phi3ForCausalLM", {}),
    "Granite": ("GraniteForCausalLM", {}),
    "GLM 4": ("Glm4ForCausalLM", {}),
    "Llama 4": ("Llama4ForCausalLM", {**_EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": 16}),
    "Moshi": ("MoshiForCausalLM", {}),
    "nanochat": ("NanoChatForCausalLM", {}),
    "Idefics": (
        "IdeficsForVisionText2Text",
        {
            "vision_config": {
                "embed_dim": 32,
                "image_size": 16,
                "patch_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "intermediate_size": 48,
            },
            "cross_layer_interval": 1,
            "additional_vocab_size": 0,
            "qk_layer_norms": True,
            "use_resampler": False,
        },
    ),
    "Kimi-Linear": ("KimiLinearForCausalLM", {**_MLA, **_EXPERTS}),
}


def build(name):
    """The model with every norm weight random, in float32."""
    import transformers

    cls_name, more = MODELS[name]
    cls = getattr(transformers, cls_name)
    torch.manual_seed(0)
    config = cls.config_class(**{**_SMALL, **more})
    # Grouped products of matrices know no float64, in which the tests look for the exact answer.
    config._experts_implementation = "eager"
    model = cls(config)
    with torch.no_grad():
        for key, t in model.named_parameters():
            if "norm" in key and t.dim() == 1:
                t.add_(torch.randn(t.shape) * 0.3)
    return model.eval()


def inputs(name):
    ids = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(1))
    more = {"decoder_input_ids": ids} if name == "T5" else {}
    if name == "Idefics":
        pixels = torch.randn(2, 1, 3, 16, 16, generator=torch.Generator().manual_seed(2))
        more = {"pixel_values": pixels, "image_attention_mask": torch.ones(2, 12, 1, dtype=torch.long)}
    return {"input_ids": ids, **more}
