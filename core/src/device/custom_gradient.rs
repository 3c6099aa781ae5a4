//! Functions with a backward of their own: for what must not be kept from forward to backward.

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::Tensor;
use torch_sys::C_tensor;

use super::torch_shim::{ErrorBuffer, made};
use crate::error::{Error, Result};

/// Makes the gradient of the input from the gradient of the output. libtorch calls it from the thread that
/// goes backward on the tensors' device, one call at a time.
type Backward = Box<dyn Fn(&Tensor) -> Result<Tensor> + Send>;

unsafe extern "C" {
    fn bs_with_gradient(
        input: *const C_tensor,
        output: *const C_tensor,
        closure: *mut c_void,
        backward: unsafe extern "C" fn(
            *mut c_void,
            *const C_tensor,
            *mut *mut C_tensor,
            *mut c_char,
            usize,
        ) -> c_int,
        release: unsafe extern "C" fn(*mut c_void),
        result: *mut *mut C_tensor,
        error: *const ErrorBuffer,
    ) -> c_int;
}

/// The values of `output`, which was computed from `input`, with a gradient for `input` that `backward` makes
/// of the gradient of the output. Nothing else is kept for backward than what `backward` holds, and that goes
/// with the graph. Gradients have no graph of their own.
///
/// # Errors
/// [`Error::Torch`] when libtorch refuses. What `backward` returns, or a panic in it, comes out of the
/// backward pass as [`Error::Torch`] with the message, [`Error::OutOfMemory`] as itself.
pub(crate) fn with_gradient(
    input: &Tensor,
    output: &Tensor,
    backward: impl Fn(&Tensor) -> Result<Tensor> + Send + 'static,
) -> Result<Tensor> {
    let closure: Backward = Box::new(backward);
    let closure = Box::into_raw(Box::new(closure));
    // SAFETY: both tensors are live for the call, which makes one new tensor. The closure is given away: the shim
    // hands it to `call`, one call at a time, and once to `release`.
    unsafe {
        made(|result, error| {
            bs_with_gradient(
                input.as_ptr(),
                output.as_ptr(),
                closure.cast(),
                call,
                release,
                result,
                error,
            )
        })
    }
}

unsafe extern "C" fn release(closure: *mut c_void) {
    // SAFETY: the pointer is the one that `with_gradient` gave away, and comes back once.
    let closure = unsafe { Box::from_raw(closure.cast::<Backward>()) };
    // What the closure holds may panic when it goes; no panic crosses C++.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(closure)));
}

unsafe extern "C" fn call(
    closure: *mut c_void,
    grad_output: *const C_tensor,
    result: *mut *mut C_tensor,
    message: *mut c_char,
    num_message_bytes: usize,
) -> c_int {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the closure is one of `with_gradient` that was not released yet.
        let closure = unsafe { &*closure.cast::<Backward>() };
        // SAFETY: libtorch holds the gradient during the call; this is a handle of our own to it.
        let grad_output = unsafe { Tensor::clone_from_ptr(grad_output.cast_mut()) };
        closure(&grad_output)
    }));
    let error = match outcome {
        Ok(Ok(gradient)) => {
            // SAFETY: the shim offers a place for one handle and takes it over. The tensor's own handle is
            // not dropped here.
            unsafe { *result = gradient.as_ptr().cast_mut() };
            std::mem::forget(gradient);
            return 0;
        }
        // The shim's messages say by themselves that memory ran out.
        Ok(Err(Error::OutOfMemory { message, .. })) => message,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "the backward of a function panicked".to_owned(),
    };
    let num_bytes = error.len().min(num_message_bytes.saturating_sub(1));
    // SAFETY: the shim offers `num_message_bytes` of its own, filled with zeros, of which the last one stays.
    unsafe { std::ptr::copy_nonoverlapping(error.as_ptr().cast(), message, num_bytes) };
    1
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::device::grad;

    fn leaf() -> Tensor {
        Tensor::from_slice(&[1.0_f32, 2.0]).set_requires_grad(true)
    }

    #[test]
    fn the_closure_makes_the_gradient_and_goes_with_the_graph() {
        let x = leaf();
        let held = Arc::new(AtomicUsize::new(0));
        let calls = Arc::clone(&held);
        let doubled = with_gradient(&x, &(&x * 2.0), move |gradient| {
            calls.fetch_add(1, Ordering::SeqCst);
            Ok(gradient * 7.0)
        })
        .unwrap();
        assert_eq!(doubled, Tensor::from_slice(&[2.0_f32, 4.0]));
        let output = &doubled * 3.0;
        let one = Tensor::from_slice(&[1.0_f32, 10.0]);
        let found = grad(&[&output], &[&one], &[&x]).unwrap();
        assert_eq!(found[0].as_ref().unwrap(), &Tensor::from_slice(&[21.0_f32, 210.0]));
        assert_eq!(held.load(Ordering::SeqCst), 1);
        assert_eq!(
            Arc::strong_count(&held),
            1,
            "freed with the graph, which `output` is still part of"
        );
        let again = grad(&[&output], &[&one], &[&x]).unwrap_err().to_string();
        assert!(again.contains("freed") || again.contains("second time"), "{again}");
    }

    #[test]
    fn without_a_graph_to_be_the_closure_goes_at_once() {
        let held = Arc::new(());
        for (x, has_graph) in [(leaf().detach(), false), (leaf(), true)] {
            let inner = Arc::clone(&held);
            let output = with_gradient(&x, &(&x * 2.0), move |gradient| {
                let _ = &inner;
                Ok(gradient.shallow_clone())
            })
            .unwrap();
            assert_eq!(output.requires_grad(), has_graph);
            assert_eq!(Arc::strong_count(&held), 1 + usize::from(has_graph));
            drop(output);
            assert_eq!(Arc::strong_count(&held), 1);
        }
        let x = leaf();
        let output = tch::no_grad(|| with_gradient(&x, &(&x * 2.0), |_| unreachable!())).unwrap();
        assert!(!output.requires_grad());
    }

    #[test]
    fn errors_and_panics_of_the_closure_come_out_of_the_backward_pass() {
        let x = leaf();
        let fail = |backward: fn(&Tensor) -> Result<Tensor>| {
            let output = with_gradient(&x, &(&x * 2.0), backward).unwrap();
            grad(&[&output], &[&output.ones_like()], &[&x]).unwrap_err()
        };
        let message = "7 is odd ".repeat(300);
        assert!(
            fail(|_| Err(Error::usage("7 is odd ".repeat(300))))
                .to_string()
                .contains(&message[..900])
        );
        let error = fail(|_| {
            Err(Error::OutOfMemory {
                action: "expanding".into(),
                message: "out of memory: 8 GiB".into(),
            })
        });
        assert!(matches!(&error, Error::OutOfMemory { message, .. } if message.contains("8 GiB")));
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let error = fail(|_| panic!("on purpose"));
        std::panic::set_hook(hook);
        assert!(error.to_string().contains("panicked"), "{error}");
    }
}
