//! One optimizer step: launched now, its results read when they have arrived.

use std::time::Instant;

use anyhow::{Context, Result};
use blockstreamer_core::adapter::Adapter;
use blockstreamer_core::batch::Batch;
use blockstreamer_core::execute::{Executor, Gradients, StepLoss, StepOptions};
use blockstreamer_core::optimizer::{Optimizer, Parameter, clip_gradient_norm};
use blockstreamer_core::stream::{Readback, StreamStats};

use super::{StepMetrics, StepTimes};

/// A step that was launched and whose results have not been read yet.
#[derive(Debug)]
pub(crate) struct Launched {
    step: u64,
    loss: StepLoss,
    grad_norm: Readback,
    learning_rate: f64,
    seconds: f64,
    read_bytes: u64,
    h2d_bytes: u64,
    times: StepTimes,
}

/// Runs the steps of one executor, one after another, and says what each moved and how long it took.
#[derive(Debug)]
pub(crate) struct Stepper<'a> {
    executor: &'a Executor,
    max_grad_norm: f64,
    /// When the step before was launched.
    launched: Instant,
    /// Totals that are in the metrics of some step.
    counted: StreamStats,
}

impl<'a> Stepper<'a> {
    /// Steps from now on. A `max_grad_norm` of 0 means no clipping; the norm is measured all the same.
    pub(crate) fn new(executor: &'a Executor, max_grad_norm: f64) -> Result<Self> {
        let max_grad_norm = if max_grad_norm == 0.0 { f64::INFINITY } else { max_grad_norm };
        let counted = executor.stats()?;
        Ok(Self { executor, max_grad_norm, launched: Instant::now(), counted })
    }

    /// Counts and times from now on.
    pub(crate) fn restart(&mut self) -> Result<()> {
        self.counted = self.executor.stats()?;
        self.launched = Instant::now();
        Ok(())
    }

    /// Gradients, clipping and update of one step. On CUDA most of it is still to be done by the device
    /// when this returns.
    pub(crate) fn launch(
        &mut self,
        batches: &[Batch],
        optimizer: &mut dyn Optimizer,
        options: StepOptions,
        learning_rate: f64,
    ) -> Result<Launched> {
        let mut sink = Gradients::new();
        let loss = self.executor.train_step(batches, options, &mut sink)?;
        let trainables = adapter_of(self.executor)?.trainables();
        let (named, gradients): (Vec<_>, Vec<_>) = sink
            .of(trainables)
            .map(|(trainable, gradient)| (trainable, gradient.shallow_clone()))
            .unzip();
        let norm = clip_gradient_norm(&gradients, self.max_grad_norm)?;
        let grad_norm = self.executor.stream().read_back(&norm)?;
        let parameters: Vec<Parameter<'_>> = named
            .iter()
            .zip(&gradients)
            .map(|(trainable, gradient)| Parameter {
                name: &trainable.name,
                value: &trainable.tensor,
                gradient,
            })
            .collect();
        optimizer.step(&parameters, learning_rate)?;
        let after = self.executor.stats()?;
        let before = std::mem::replace(&mut self.counted, after);
        // The device's queue is short: launching a step returns when the device has nearly done it.
        let seconds = self.launched.elapsed().as_secs_f64();
        self.launched = Instant::now();
        Ok(Launched {
            step: options.step,
            loss,
            grad_norm,
            learning_rate,
            seconds,
            read_bytes: after.read_bytes - before.read_bytes,
            h2d_bytes: after.h2d_bytes - before.h2d_bytes,
            times: StepTimes::between(&before, &after),
        })
    }

    /// Waits for the results of a step.
    pub(crate) fn finish(&self, launched: Launched) -> Result<StepMetrics> {
        Ok(StepMetrics {
            step: launched.step + 1,
            loss: self.executor.loss_value(&launched.loss)?,
            learning_rate: launched.learning_rate,
            grad_norm: self.executor.stream().value(&launched.grad_norm)?,
            tokens: launched.loss.num_tokens,
            seconds: launched.seconds,
            read_bytes: launched.read_bytes,
            h2d_bytes: launched.h2d_bytes,
            times: launched.times,
        })
    }
}

/// The adapter that is trained.
pub(crate) fn adapter_of(executor: &Executor) -> Result<&dyn Adapter> {
    executor.adapter().context("the run lost its adapter")
}
