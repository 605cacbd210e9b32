// Runs a GGUF model on token ids: logits of every prompt position to a file (f32), then greedy tokens.
// usage: logits MODEL IDS(comma separated) NEW_TOKENS OUT [ADAPTER]
#include "llama.h"
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

int main(int argc, char ** argv) {
    if (argc < 5) return 2;
    std::vector<llama_token> ids;
    for (char * p = strtok(argv[2], ","); p; p = strtok(nullptr, ",")) ids.push_back(atoi(p));
    const int extra = atoi(argv[3]);
    llama_backend_init();
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_ERROR || getenv("VERBOSE")) fputs(text, stderr);
    }, nullptr);
    auto mp = llama_model_default_params();
    llama_model * model = llama_model_load_from_file(argv[1], mp);
    if (!model) return 3;
    auto cp = llama_context_default_params();
    cp.n_ctx = ids.size() + extra + 8;
    cp.n_batch = cp.n_ubatch = cp.n_ctx;
    cp.type_k = GGML_TYPE_F32;
    cp.type_v = GGML_TYPE_F32;
    cp.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    cp.n_threads = cp.n_threads_batch = 2;
    cp.swa_full = true;
    llama_context * ctx = llama_init_from_model(model, cp);
    if (!ctx) return 4;
    if (argc > 5) {
        llama_adapter_lora * lora = llama_adapter_lora_init(model, argv[5]);
        if (!lora) return 5;
        float one = 1.0f;
        llama_set_adapters_lora(ctx, &lora, 1, &one);
    }
    const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    FILE * out = fopen(argv[4], "wb");
    llama_batch batch = llama_batch_init(ids.size(), 0, 1);
    for (size_t i = 0; i < ids.size(); i++) {
        batch.token[i] = ids[i]; batch.pos[i] = i; batch.n_seq_id[i] = 1; batch.seq_id[i][0] = 0; batch.logits[i] = 1;
    }
    batch.n_tokens = ids.size();
    if (llama_decode(ctx, batch)) return 6;
    for (size_t i = 0; i < ids.size(); i++) fwrite(llama_get_logits_ith(ctx, i), 4, vocab, out);
    int last = ids.size() - 1;
    size_t pos = ids.size();
    for (int n = 0; n < extra; n++) {
        const float * l = llama_get_logits_ith(ctx, last);
        int best = 0;
        for (int j = 1; j < vocab; j++) if (l[j] > l[best]) best = j;
        printf("%s%d", n ? "," : "", best);
        batch.n_tokens = 1; batch.token[0] = best; batch.pos[0] = pos++; batch.logits[0] = 1;
        if (llama_decode(ctx, batch)) return 7;
        fwrite(llama_get_logits_ith(ctx, 0), 4, vocab, out);
        last = 0;
    }
    printf("\n");
    fclose(out);
    return 0;
}
