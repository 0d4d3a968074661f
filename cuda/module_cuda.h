/* The bindings of the CUDA kernels: included by module.c where they are built in. */

static PyObject *cuda_plan(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct args a = {args, nargs, 0};
    const struct rx_batch *b = take_batch(&a);
    int32_t *words = take_pointer(&a);
    if (!finish(&a)) return NULL;
    const struct rx_plan plan = rx_plan_cuda(b, words);
    return Py_BuildValue("(LiiiL)", (long long)plan.num_words, plan.num_decode, plan.num_shared,
                         plan.num_prefill, (long long)plan.num_partials);
}

static PyObject *cuda_batch(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct args a = {args, nargs, 0};
    struct rx_batch b = take_sequences(&a);
    b.plan.words = take_pointer(&a);
    b.plan.num_words = take_int(&a);
    b.plan.num_decode = (int32_t)take_int(&a);
    b.plan.num_shared = (int32_t)take_int(&a);
    b.plan.num_prefill = (int32_t)take_int(&a);
    b.plan.num_partials = take_int(&a);
    if (!finish(&a)) return NULL;
    return new_batch(b);
}

static PyObject *copy_pages_cuda(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct args a = {args, nargs, 0};
    const struct rx_copy copy = take_copy(&a);
    const int max_blocks = (int)take_int(&a);
    void *stream = take_pointer(&a);
    if (!finish(&a)) return NULL;
    const char *error;
    Py_BEGIN_ALLOW_THREADS
    error = rx_copy_cuda(&copy, max_blocks, stream);
    Py_END_ALLOW_THREADS
    return result(error);
}

#define CUDA_METHODS                                                                       \
    {"cuda_plan", (PyCFunction)(void (*)(void))cuda_plan, METH_FASTCALL, NULL},            \
    {"cuda_batch", (PyCFunction)(void (*)(void))cuda_batch, METH_FASTCALL, NULL},          \
    {"copy_pages_cuda", (PyCFunction)(void (*)(void))copy_pages_cuda, METH_FASTCALL, NULL},
