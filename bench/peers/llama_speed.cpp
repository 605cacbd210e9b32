// Times llama.cpp on a GGUF model: a prompt, then tokens one by one; three rounds on two threads.
// usage: llama_speed MODEL PROMPT_TOKENS NEW_TOKENS
#include "llama.h"
#include <cstdio>
#include <cstdlib>
#include <ctime>

static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

int main(int argc, char ** argv) {
    if (argc < 4) return 2;
    const int prompt = atoi(argv[2]), extra = atoi(argv[3]);
    llama_backend_init();
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) return 3;
    auto cp = llama_context_default_params();
    cp.n_ctx = prompt + extra + 8;
    cp.n_batch = cp.n_ubatch = 512;
    cp.n_threads = cp.n_threads_batch = 2;
    llama_context * ctx = llama_init_from_model(model, cp);
    if (!ctx) return 4;
    llama_batch batch = llama_batch_init(prompt, 0, 1);
    for (int round = 0; round < 3; round++) {
        llama_memory_clear(llama_get_memory(ctx), true);
        for (int i = 0; i < prompt; i++) {
            batch.token[i] = i * 7919 % 150; batch.pos[i] = i; batch.n_seq_id[i] = 1; batch.seq_id[i][0] = 0;
            batch.logits[i] = i == prompt - 1;
        }
        batch.n_tokens = prompt;
        double begin = now();
        if (llama_decode(ctx, batch)) return 5;
        llama_get_logits_ith(ctx, prompt - 1);
        const double read = now() - begin;
        begin = now();
        for (int n = 0; n < extra; n++) {
            batch.n_tokens = 1; batch.token[0] = n; batch.pos[0] = prompt + n; batch.logits[0] = 1;
            if (llama_decode(ctx, batch)) return 6;
            llama_get_logits_ith(ctx, 0);
        }
        printf("prompt %.1f tokens/s, decoding %.2f tokens/s\n", prompt / read, extra / (now() - begin));
        fflush(stdout);
    }
    return 0;
}
