/* Python bindings. Pointers are integers; the callers in Python have checked what they mean.
 * See tiers/_kernels.pyi for the signatures. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"
#include "plan.h"
#include "tree_node.h"
#include "threads.h"

#ifdef RX_CUDA_ARCHS /* given where the CUDA kernels are built in */
#define RX_WITH_CUDA
#else
#define RX_CUDA_ARCHS ""
#endif

/* Reads the positional arguments of one call in order; the first error sticks. */
struct args {
    PyObject *const *next;
    Py_ssize_t left;
    int failed;
};

static PyObject *take(struct args *a) {
    if (a->left == 0) {
        PyErr_SetString(PyExc_TypeError, "too few arguments");
        a->failed = 1;
        return NULL;
    }
    a->left--;
    return *a->next++;
}

static int64_t take_int(struct args *a) {
    PyObject *object = a->failed ? NULL : take(a);
    if (!object) return 0;
    const long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) a->failed = 1;
    return value;
}

static void *take_pointer(struct args *a) { return (void *)(intptr_t)take_int(a); }

static float take_float(struct args *a) {
    PyObject *object = a->failed ? NULL : take(a);
    if (!object) return 0;
    const double value = PyFloat_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred()) a->failed = 1;
    return (float)value;
}

static int finish(struct args *a) {
    if (!a->failed && a->left) {
        PyErr_SetString(PyExc_TypeError, "too many arguments");
        a->failed = 1;
    }
    return !a->failed;
}

static PyObject *result(const char *error) {
    if (!error) Py_RETURN_NONE;
    PyErr_SetString(PyExc_RuntimeError, error);
    return NULL;
}

static struct rx_copy take_copy(struct args *a) {
    struct rx_copy copy = {0};
    copy.src = take_pointer(a);
    copy.src_stride = take_int(a);
    copy.src_ids = take_pointer(a);
    copy.dst = take_pointer(a);
    copy.dst_stride = take_int(a);
    copy.dst_ids = take_pointer(a);
    copy.num_pages = take_int(a);
    copy.nbytes = take_int(a);
    return copy;
}

static PyObject *copy_pages(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct args a = {args, nargs, 0};
    const struct rx_copy copy = take_copy(&a);
    uint32_t *crcs = take_pointer(&a);
    if (!finish(&a)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    rx_copy_cpu(&copy, crcs);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static const char BATCH[] = "tiers._kernels.batch";

static void free_batch(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, BATCH)); }

static PyObject *new_batch(struct rx_batch b) {
    struct rx_batch *kept = PyMem_Malloc(sizeof b);
    if (!kept) return PyErr_NoMemory();
    *kept = b;
    PyObject *capsule = PyCapsule_New(kept, BATCH, free_batch);
    if (!capsule) PyMem_Free(kept);
    return capsule;
}

static struct rx_batch take_sequences(struct args *a) {
    struct rx_batch b = {0};
    b.num_seqs = (int32_t)take_int(a);
    b.num_tokens = (int32_t)take_int(a);
    b.page_size = (int32_t)take_int(a);
    b.cu_seqlens_q = take_pointer(a);
    b.kv_lens = take_pointer(a);
    b.page_indptr = take_pointer(a);
    b.pages = take_pointer(a);
    return b;
}

static PyObject *batch(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct args a = {args, nargs, 0};
    struct rx_batch b = take_sequences(&a);
    b.num_groups = (int32_t)take_int(&a);
    b.group_indptr = take_pointer(&a);
    b.group_seqs = take_pointer(&a);
    b.group_lens = take_pointer(&a);
    if (!finish(&a)) return NULL;
    return new_batch(b);
}

static const struct rx_batch *take_batch(struct args *a) {
    PyObject *capsule = a->failed ? NULL : take(a);
    const struct rx_batch *b = capsule ? PyCapsule_GetPointer(capsule, BATCH) : NULL;
    if (!b) a->failed = 1;
    return b;
}

static struct rx_layer take_layer(struct args *a) {
    struct rx_layer l = {0};
    l.dtype = (enum rx_dtype)take_int(a);
    l.q_heads = (int32_t)take_int(a);
    l.kv_heads = (int32_t)take_int(a);
    l.head_dim = (int32_t)take_int(a);
    l.pool = take_pointer(a);
    l.page_stride = take_int(a);
    l.layer_offset = take_int(a);
    l.q = take_pointer(a);
    l.q_stride = take_int(a);
    l.q_head_stride = take_int(a);
    l.k = take_pointer(a);
    l.k_stride = take_int(a);
    l.k_head_stride = take_int(a);
    l.v = take_pointer(a);
    l.v_stride = take_int(a);
    l.v_head_stride = take_int(a);
    l.out = take_pointer(a);
    l.out_stride = take_int(a);
    l.out_head_stride = take_int(a);
    l.scale = take_float(a);
    l.softcap = take_float(a);
    l.window = (int32_t)take_int(a);
    l.sinks = take_pointer(a);
    return l;
}

static PyObject *attention(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct args a = {args, nargs, 0};
    const struct rx_batch *b = take_batch(&a);
    const struct rx_layer layer = take_layer(&a);
    void *workspace = take_pointer(&a);
    const int64_t workspace_bytes = take_int(&a);
    void *stream = take_pointer(&a);
    if (!finish(&a)) return NULL;
    struct rx_batch step = *b;
    step.workspace = workspace;
    step.workspace_bytes = workspace_bytes;
    const char *error;
    Py_BEGIN_ALLOW_THREADS
#ifdef RX_WITH_CUDA
    error = step.plan.words ? rx_attention_cuda(&layer, &step, stream)
                            : rx_attention_cpu(&layer, &step);
#else
    (void)stream;
    error = rx_attention_cpu(&layer, &step);
#endif
    Py_END_ALLOW_THREADS
    return result(error);
}

/* Tokens, their heads, and the rows that are read and written. */
static struct rx_rows take_rows(struct args *a) {
    struct rx_rows rows = {.dtype = (enum rx_dtype)take_int(a)};
    rows.num_tokens = take_int(a);
    rows.num_heads = (int32_t)take_int(a);
    rows.dim = (int32_t)take_int(a);
    rows.x = take_pointer(a);
    rows.x_stride = take_int(a);
    rows.out = take_pointer(a);
    rows.out_stride = take_int(a);
    return rows;
}

static PyObject *run_rows(struct args *a, struct rx_rows rows) {
    if (!finish(a)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    rx_rows_cpu(&rows);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *rms_norm(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct args a = {args, nargs, 0};
    struct rx_rows rows = take_rows(&a);
    rows.weight = take_pointer(&a);
    rows.eps = take_float(&a);
    return run_rows(&a, rows);
}

static PyObject *rotate(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct args a = {args, nargs, 0};
    struct rx_rows rows = take_rows(&a);
    rows.cos = take_pointer(&a);
    rows.sin = take_pointer(&a);
    rows.rotary_dim = (int32_t)take_int(&a);
    return run_rows(&a, rows);
}

static PyObject *gate(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct args a = {args, nargs, 0};
    return run_rows(&a, take_rows(&a));
}

#ifdef RX_WITH_CUDA
#include "module_cuda.h"
#endif

static PyObject *set_num_threads(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct args a = {args, nargs, 0};
    const int64_t n = take_int(&a);
    if (!finish(&a)) return NULL;
    rx_set_num_threads((int)(n > 1 << 20 ? 1 << 20 : n));
    Py_RETURN_NONE;
}

static PyObject *select_isa(PyObject *self, PyObject *name) {
    (void)self;
    PyObject *bytes = PyUnicode_AsUTF8String(name);
    if (!bytes) return NULL;
    PyObject *done = result(rx_select_isa(PyBytes_AsString(bytes)));
    Py_DECREF(bytes);
    return done;
}

static PyObject *build_info(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return Py_BuildValue("{s:s,s:s,s:s}", "compiler", __VERSION__, "cuda_archs", RX_CUDA_ARCHS,
                         "cpu_isa", rx_cpu_isa());
}

static PyMethodDef methods[] = {
    {"copy_pages", (PyCFunction)(void (*)(void))copy_pages, METH_FASTCALL, NULL},
    {"batch", (PyCFunction)(void (*)(void))batch, METH_FASTCALL, NULL},
    {"attention", (PyCFunction)(void (*)(void))attention, METH_FASTCALL, NULL},
    {"rms_norm", (PyCFunction)(void (*)(void))rms_norm, METH_FASTCALL, NULL},
    {"rotate", (PyCFunction)(void (*)(void))rotate, METH_FASTCALL, NULL},
    {"gate", (PyCFunction)(void (*)(void))gate, METH_FASTCALL, NULL},
    {"set_num_threads", (PyCFunction)(void (*)(void))set_num_threads, METH_FASTCALL, NULL},
    {"select_isa", select_isa, METH_O, NULL},
#ifdef RX_WITH_CUDA
    CUDA_METHODS
#endif
    {"common_prefix", (PyCFunction)(void (*)(void))rx_common_prefix, METH_FASTCALL, NULL},
    {"untrack", rx_untrack, METH_O, NULL},
    {"locate", (PyCFunction)(void (*)(void))rx_locate, METH_FASTCALL, NULL},
    {"build_info", build_info, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiers._kernels", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) {
    PyObject *created = PyModule_Create(&module);
    if (created && (rx_add_node_type(created) < 0 ||
                    PyModule_AddIntConstant(created, "SPLIT", RX_SPLIT) < 0 ||
                    PyModule_AddIntConstant(created, "PLAN_HEADER", RX_PLAN_HEADER) < 0))
        Py_CLEAR(created);
    return created;
}
