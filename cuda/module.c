/* Python bindings. Pointers are integers; the callers in Python have checked what they mean.
 * See tiers/_kernels.pyi for the signatures. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"

#ifndef RX_CUDA_ARCHS
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

static PyObject *copy_pages(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct args a = {args, nargs, 0};
    struct rx_copy copy = {0};
    copy.src = take_pointer(&a);
    copy.src_stride = take_int(&a);
    copy.src_ids = take_pointer(&a);
    copy.dst = take_pointer(&a);
    copy.dst_stride = take_int(&a);
    copy.dst_ids = take_pointer(&a);
    copy.num_pages = take_int(&a);
    copy.nbytes = take_int(&a);
    if (!finish(&a)) return NULL;
    const char *error;
    Py_BEGIN_ALLOW_THREADS
    error = rx_copy_cpu(&copy);
    Py_END_ALLOW_THREADS
    return result(error);
}

static PyObject *build_info(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return Py_BuildValue("{s:s,s:s}", "compiler", __VERSION__, "cuda_archs", RX_CUDA_ARCHS);
}

static PyMethodDef methods[] = {
    {"copy_pages", (PyCFunction)(void (*)(void))copy_pages, METH_FASTCALL, NULL},
    {"build_info", build_info, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiers._kernels", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&module); }
