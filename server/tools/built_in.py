"""The formats of well-known models."""

from server.tools.response_template import CallRegion, Region, ResponseTemplate

_MISTRAL = ("[/INST]", "[/TOOL_RESULTS]")

BUILT_IN = {
    # Hermes 2 and 3, Qwen 2.5 and 3, SmolLM 3: an object between tags for each call.
    "hermes": ResponseTemplate(
        ("<|im_start|>assistant\n",),
        Region(("<think>",), ("</think>",)),
        CallRegion(("<tool_call>",), ("</tool_call>",), repeats=True),
    ),
    # Llama 3.1 to 3.3: an answer that is one object; the model makes one call at a time.
    "llama3_json": ResponseTemplate(
        ("<|start_header_id|>assistant<|end_header_id|>\n\n",),
        None,
        CallRegion(("<|python_tag|>",), (), arguments_key="parameters", is_unopened=True),
    ),
    # Mistral 7B v0.3, Nemo, Large 2407, Small 2409 and 2501: a list after a special token.
    "mistral": ResponseTemplate(
        _MISTRAL, None, CallRegion(("[TOOL_CALLS]",), (), id_key="id", is_list=True)
    ),
    # Mistral since Small 3.1 and Magistral: name and arguments after special tokens.
    "mistral_v11": ResponseTemplate(
        _MISTRAL,
        Region(("[THINK]",), ("[/THINK]",)),
        CallRegion(("[TOOL_CALLS]",), (), name_end="[ARGS]", repeats=True),
    ),
}
