//! The scope that the executor hands to a family while a block is on the device.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::adapter::{Adapter, AdapterCall};
use crate::block::BlockIndex;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::execute::Residents;
use crate::numerics::{
    self, AttentionKernel, ExpertCall, ExpertKernel, ExpertStack, ExpertWeight, Mxfp4,
};
use crate::scope::{AttentionOptions, ExpertShape, Routing, Scope};
use crate::state::NamedTensors;

/// One block on the device, with the residents behind it, as a family's forward sees it.
///
/// Tensors are as stored. Real numbers are cast to the compute dtype where they are used, which costs
/// nothing when they have it already.
#[derive(Debug, Clone, Copy)]
pub struct BlockScope<'a> {
    /// The streamed block that is running; `None` in `embed`, `final_hidden` and `logits`.
    pub block: Option<BlockIndex>,
    /// Its name, for messages.
    pub block_name: &'a str,
    /// The tensors of the block.
    pub tensors: &'a NamedTensors,
    /// The tensors that every block sees, where the block has none of the same name.
    pub residents: &'a Residents,
    /// What changes the linears, if anything does.
    pub adapter: Option<&'a dyn Adapter>,
    /// Seed of this visit's dropout; `None`: no dropout.
    pub dropout_seed: Option<u64>,
    /// The dtype of activations.
    pub compute_kind: Kind,
    /// Where the tensors are.
    pub device: Device,
    /// How attention is computed.
    pub attention: AttentionKernel,
    /// How experts are computed.
    pub experts: ExpertKernel,
}

impl BlockScope<'_> {
    fn find(&self, name: &str) -> Result<&Tensor> {
        self.optional(name).ok_or_else(|| {
            if self.residents.gathered.find(name).is_some() {
                let message = "lies in host memory, from which rows are gathered and nothing else: only \
                               Scope::embedding may ask for it there; give its block another placement \
                               than Placement::Gathered, or keep it on the device";
                return self.placed(Error::tensor(name, message));
            }
            let names: Vec<_> = self.tensors.iter().map(|entry| entry.0).collect();
            let message = format!("is neither in the block ({}) nor a resident", names.join(", "));
            self.placed(Error::tensor(name, message))
        })
    }

    /// Checks that the weight of a linear or an embedding is a matrix of real numbers.
    fn matrix<'t>(&self, name: &str, weight: &'t Tensor) -> Result<&'t Tensor> {
        if weight.dim() != 2 || !weight.is_floating_point() {
            let message = format!(
                "must be a matrix of real numbers, but is {:?} of shape {:?}",
                weight.kind(),
                weight.size()
            );
            return Err(self.placed(Error::tensor(name, message)));
        }
        Ok(weight)
    }

    /// The block that the tensor called `name` belongs to.
    fn holder(&self, name: &str) -> Option<BlockIndex> {
        match self.tensors.find(name) {
            Some(_) => self.block,
            None => self.residents.blocks.get(name).copied(),
        }
    }

    fn cast(&self, tensor: &Tensor) -> Result<Tensor> {
        match tensor.is_floating_point() && tensor.f_kind()? != self.compute_kind {
            true => Ok(tensor.f_to_kind(self.compute_kind)?),
            // Asking libtorch to convert nothing costs time, and this is done for every weight.
            false => Ok(tensor.shallow_clone()),
        }
    }

    /// A tensor of the block or of the residents, if there is one.
    fn optional(&self, name: &str) -> Option<&Tensor> {
        self.tensors.find(name).or_else(|| self.residents.tensors.find(name))
    }

    /// The stack of matrices called `name`, of these experts of the layer, with its bias and adapter.
    fn stack(&self, name: &str, experts: &Range<usize>) -> Result<ExpertStack<'_>> {
        let [blocks, scales, bias] =
            ["blocks", "scales", "bias"].map(|part| format!("{name}_{part}"));
        let (weight, stored) = match self.optional(&blocks) {
            Some(codes) => {
                let scales = self.find(&scales)?.shallow_clone();
                let packed =
                    Mxfp4::new(codes.shallow_clone(), scales).map_err(|error| match error {
                        Error::Tensor { tensor, message } => {
                            self.placed(Error::tensor(format!("{name}_{tensor}"), message))
                        }
                        other => other,
                    })?;
                (ExpertWeight::Packed(packed), &*blocks)
            }
            None => (ExpertWeight::Dense(self.find(name)?), name),
        };
        let bias = self.optional(&bias).map(|bias| self.cast(bias)).transpose()?;
        let factors = match (self.adapter, self.holder(stored)) {
            (Some(adapter), Some(block)) => {
                let call = AdapterCall { block, site: name, dropout_seed: self.dropout_seed };
                adapter.expert_factors(call, experts.clone(), self.compute_kind)?
            }
            _ => None,
        };
        Ok(ExpertStack { weight, bias, factors })
    }

    fn placed(&self, error: Error) -> Error {
        error.in_block(self.block_name)
    }
}

impl Scope for BlockScope<'_> {
    fn linear(&self, site: &str, x: &Tensor) -> Result<Tensor> {
        let name = format!("{site}.weight");
        let weight = self.matrix(&name, self.find(&name)?)?;
        if x.size().last() != weight.size().last() {
            let message = format!(
                "of shape {:?} does not fit an input of shape {:?}",
                weight.size(),
                x.size()
            );
            return Err(self.placed(Error::tensor(name, message)));
        }
        let bias = self.optional(&format!("{site}.bias"));
        let bias = bias.map(|bias| self.cast(bias)).transpose()?;
        let output = x.f_linear(&self.cast(weight)?, bias)?;
        let (Some(adapter), Some(block)) = (self.adapter, self.holder(&name)) else {
            return Ok(output);
        };
        let call = AdapterCall { block, site, dropout_seed: self.dropout_seed };
        adapter.linear(call, x, output)
    }

    fn embedding(&self, site: &str, ids: &Tensor) -> Result<Tensor> {
        let name = format!("{site}.weight");
        let weight = match self.residents.gathered.find(&name) {
            Some(table) if self.tensors.find(&name).is_none() => table,
            _ => self.find(&name)?,
        };
        let weight = self.matrix(&name, weight)?;
        // Gather first: the table is far larger than the rows.
        self.cast(&Tensor::f_embedding(weight, ids, -1, false, false)?)
    }

    fn tensor(&self, name: &str) -> Result<Tensor> {
        self.cast(self.find(name)?)
    }

    fn stored_tensor(&self, name: &str) -> Result<Tensor> {
        Ok(self.find(name)?.shallow_clone())
    }

    fn attention(
        &self,
        site: &str,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        context: &Context,
        options: &AttentionOptions<'_>,
    ) -> Result<Tensor> {
        let pattern = &context.attention;
        numerics::attention(self.attention, query, key, value, pattern, options).map_err(|error| {
            match error {
                Error::Tensor { tensor, message } => {
                    self.placed(Error::tensor(format!("{site}: {tensor}"), message))
                }
                other => other,
            }
        })
    }

    fn experts(
        &self,
        site: &str,
        x: &Tensor,
        routing: &Routing,
        shape: &ExpertShape,
        sum: Option<&Tensor>,
    ) -> Result<Tensor> {
        let names = ["gate_up_proj", "down_proj"].map(|name| format!("{site}.{name}"));
        let [gate_up, down] = &names;
        let call = ExpertCall {
            x,
            routing,
            shape,
            gate_up: self.stack(gate_up, &shape.experts)?,
            down: self.stack(down, &shape.experts)?,
            sum,
        };
        numerics::experts(self.experts, &call).map_err(|error| match error {
            Error::Tensor { tensor, message } => {
                self.placed(Error::tensor(format!("{site}.{tensor}"), message))
            }
            other => other,
        })
    }

    fn compute_kind(&self) -> Kind {
        self.compute_kind
    }

    fn device(&self) -> Device {
        self.device
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::adapter::Trainable;
    use crate::scope::{ExpertActivation, GateUp};

    fn wave(shape: &[i64], kind: Kind) -> Tensor {
        let count = shape.iter().product::<i64>();
        let values = (Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.7).sin();
        values.view(shape).to_kind(kind)
    }

    fn scope<'a>(tensors: &'a NamedTensors, residents: &'a Residents) -> BlockScope<'a> {
        BlockScope {
            block: Some(BlockIndex(3)),
            block_name: "layers.3",
            tensors,
            residents,
            adapter: None,
            dropout_seed: Some(9),
            compute_kind: Kind::Float,
            device: Device::Cpu,
            attention: AttentionKernel::Eager,
            experts: ExpertKernel::Loop,
        }
    }

    fn tensors() -> NamedTensors {
        NamedTensors::new()
            .with("proj.weight", wave(&[3, 4], Kind::BFloat16))
            .with("proj.bias", wave(&[3], Kind::Half))
            .with("norm.weight", wave(&[4], Kind::BFloat16))
            .with("counts.weight", Tensor::ones([3, 4], (Kind::Int64, Device::Cpu)))
    }

    /// Adds the number of the block and tells what it was asked.
    #[derive(Debug)]
    struct Marker;
    impl Adapter for Marker {
        fn trainables(&self) -> &[Trainable] {
            &[]
        }
        fn linear(&self, call: AdapterCall<'_>, x: &Tensor, output: Tensor) -> Result<Tensor> {
            assert_eq!((call.site, call.dropout_seed), ("proj", Some(9)));
            assert_eq!(x.size(), [2, 4]);
            Ok(output + call.block.0 as f64)
        }
        fn export(&self, _: &Path, _: &str) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_linear_casts_its_stored_weight_and_bias_and_then_asks_the_adapter() {
        let (tensors, residents) = (tensors(), Residents::default());
        let mut scope = scope(&tensors, &residents);
        let x = wave(&[2, 4], Kind::Float);
        let single = |name: &str| tensors.get(name).unwrap().to_kind(Kind::Float);
        let wanted = x.matmul(&single("proj.weight").tr()) + single("proj.bias");
        let plain = scope.linear("proj", &x).unwrap();
        assert_eq!(plain.kind(), Kind::Float);
        assert!(plain.allclose(&wanted, 1e-6, 1e-6, false));
        scope.adapter = Some(&Marker);
        assert!(scope.linear("proj", &x).unwrap().equal(&(plain + 3.0)));
    }

    #[test]
    fn residents_are_seen_where_the_block_has_no_tensor_of_the_name() {
        let tensors = tensors();
        let residents = Residents {
            tensors: NamedTensors::new()
                .with("norm.weight", wave(&[9], Kind::Float))
                .with("embed.weight", wave(&[8, 2], Kind::BFloat16)),
            ..Residents::default()
        };
        let scope = scope(&tensors, &residents);
        assert_eq!(scope.tensor("norm.weight").unwrap().size(), [4]);
        let ids = Tensor::from_slice(&[7_i64, 0]).view([1, 2]);
        let rows = scope.embedding("embed", &ids).unwrap();
        assert_eq!((rows.kind(), rows.size()), (Kind::Float, vec![1, 2, 2]));
        let table = residents.tensors.get("embed.weight").unwrap().to_kind(Kind::Float);
        assert!(rows.get(0).get(0).equal(&table.get(7)));
    }

    #[test]
    fn a_table_in_host_memory_is_gathered_from_and_asked_for_nothing_else() {
        let (tensors, table) = (tensors(), wave(&[8, 4], Kind::BFloat16));
        let gathered = NamedTensors::new().with("embed.weight", table.shallow_clone());
        let residents = Residents { gathered, ..Residents::default() };
        let scope = scope(&tensors, &residents);
        let ids = Tensor::from_slice(&[7_i64, 0]);
        let rows = scope.embedding("embed", &ids).unwrap();
        assert!(rows.equal(&table.to_kind(Kind::Float).index_select(0, &ids)));
        let refused = [
            scope.linear("embed", &wave(&[2, 4], Kind::Float)),
            scope.tensor("embed.weight"),
            scope.stored_tensor("embed.weight"),
        ];
        for error in refused.map(|result| result.unwrap_err().to_string()) {
            for part in ["'layers.3'", "'embed.weight'", "Placement::Gathered"] {
                assert!(error.contains(part), "{error}");
            }
        }
    }

    #[test]
    fn plain_tensors_are_cast_only_when_they_are_real_numbers_and_only_on_request() {
        let (tensors, residents) = (tensors(), Residents::default());
        let scope = scope(&tensors, &residents);
        assert_eq!(scope.tensor("norm.weight").unwrap().kind(), Kind::Float);
        assert_eq!(scope.stored_tensor("norm.weight").unwrap().kind(), Kind::BFloat16);
        assert_eq!(scope.tensor("counts.weight").unwrap().kind(), Kind::Int64);
    }

    #[test]
    fn errors_name_the_block_and_the_tensor() {
        let (tensors, residents) = (tensors(), Residents::default());
        let scope = scope(&tensors, &residents);
        let x = wave(&[2, 5], Kind::Float);
        for (result, tensor, why) in [
            (scope.linear("gate", &x), "'gate.weight'", "proj.weight, proj.bias"),
            (scope.linear("proj", &x), "'proj.weight'", "[2, 5]"),
            (scope.linear("counts", &x), "'counts.weight'", "Int64"),
            (scope.embedding("norm", &x), "'norm.weight'", "[4]"),
            (scope.tensor("sinks"), "'sinks'", "nor a resident"),
        ] {
            let text = result.unwrap_err().to_string();
            for part in ["'layers.3'", tensor, why] {
                assert!(text.contains(part), "{text}");
            }
        }
    }

    #[test]
    fn attention_takes_window_and_sinks_and_errors_name_block_and_site() {
        let (tensors, residents) = (tensors(), Residents::default());
        let scope = scope(&tensors, &residents);
        let x = wave(&[1, 2, 5, 4], Kind::Float);
        let context = Context::default();
        let sinks = wave(&[2], Kind::Float);
        let attend = |options: &AttentionOptions<'_>| {
            scope.attention("self_attn", &x, &x, &x, &context, options)
        };
        let plain = AttentionOptions::new(0.5);
        let outputs = [plain, plain.window(Some(2)), plain.sinks(&sinks)]
            .map(|options| attend(&options).unwrap());
        for (a, b) in [(0, 1), (0, 2), (1, 2)] {
            assert!(!outputs[a].allclose(&outputs[b], 1e-3, 1e-3, false));
        }
        let text = attend(&plain.sinks(&wave(&[3], Kind::Float))).unwrap_err().to_string();
        for part in ["'layers.3'", "'self_attn: sinks'", "[3]"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn experts_find_their_weights_and_errors_name_block_and_tensor() {
        let tensors = NamedTensors::new()
            .with("mlp.experts.gate_up_proj", wave(&[2, 6, 4], Kind::BFloat16))
            .with("mlp.experts.down_proj", wave(&[2, 4, 3], Kind::BFloat16))
            .with("bad.gate_up_proj", wave(&[2, 6, 5], Kind::BFloat16))
            .with("bad.down_proj", wave(&[2, 4, 3], Kind::BFloat16));
        let residents = Residents::default();
        let scope = scope(&tensors, &residents);
        let x = wave(&[3, 4], Kind::Float);
        let routing = Routing {
            experts: Tensor::from_slice(&[1_i64, 0, 1]).view([3, 1]),
            weights: Tensor::from_slice(&[2.0_f32, 1.0, 0.5]).view([3, 1]),
        };
        let shape = ExpertShape {
            experts: 0..2,
            gate_up: GateUp::Concatenated,
            activation: ExpertActivation::Silu,
        };
        let output = scope.experts("mlp.experts", &x, &routing, &shape, None).unwrap();
        let matrix = |name: &str| {
            tensors.get(&format!("mlp.experts.{name}")).unwrap().get(1).to_kind(Kind::Float)
        };
        let fused = x.get(0).unsqueeze(0).matmul(&matrix("gate_up_proj").tr());
        let inner = fused.narrow(1, 0, 3).silu() * fused.narrow(1, 3, 3);
        let wanted = inner.matmul(&matrix("down_proj").tr()) * 2.0;
        assert!(output.narrow(0, 0, 1).allclose(&wanted, 1e-5, 1e-6, false));

        for (site, tensor, why) in
            [("bad", "'bad.gate_up_proj'", "[2, 6, 5]"), ("none", "'none.gate_up_proj'", "nor a")]
        {
            let result = scope.experts(site, &x, &routing, &shape, None);
            let text = result.unwrap_err().to_string();
            for part in ["'layers.3'", tensor, why] {
                assert!(text.contains(part), "{text}");
            }
        }
    }

    /// Answers with factors of zeros, and tells what it was asked.
    #[derive(Debug)]
    struct Factors;
    impl Adapter for Factors {
        fn trainables(&self) -> &[Trainable] {
            &[]
        }
        fn linear(&self, _: AdapterCall<'_>, _: &Tensor, output: Tensor) -> Result<Tensor> {
            Ok(output)
        }
        fn expert_factors(
            &self,
            call: AdapterCall<'_>,
            experts: Range<usize>,
            kind: Kind,
        ) -> Result<Option<numerics::LowRankFactors>> {
            assert_eq!((call.block, experts), (BlockIndex(3), 0..2));
            let [outer, inner] = match call.site {
                "mlp.experts.gate_up_proj" => [64, 32],
                "mlp.experts.down_proj" => [32, 32],
                other => panic!("{other}"),
            };
            let zeros = |size: [i64; 3]| Tensor::zeros(size, (kind, Device::Cpu));
            let (a, b) = (zeros([2, 1, inner]), zeros([2, outer, 1]));
            Ok(Some(numerics::LowRankFactors { a, b, scaling: 1.0 }))
        }
        fn export(&self, _: &Path, _: &str) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn packed_experts_and_biases_are_found_by_name_and_adapted_under_the_name_unpacked() {
        let residents = Residents::default();
        let pack = |size: [i64; 3]| Mxfp4::pack(&wave(&size, Kind::Float)).unwrap();
        let (gate_up, down) = (pack([2, 64, 32]), pack([2, 32, 32]));
        let biases = [wave(&[2, 64], Kind::BFloat16), wave(&[2, 32], Kind::BFloat16) + 1.0];
        let with_biases = || {
            let [of_gate_up, of_down] = &biases;
            NamedTensors::new()
                .with("mlp.experts.gate_up_proj_bias", of_gate_up.shallow_clone())
                .with("mlp.experts.down_proj_bias", of_down.shallow_clone())
        };
        let packed = with_biases()
            .with("mlp.experts.gate_up_proj_blocks", gate_up.blocks().shallow_clone())
            .with("mlp.experts.gate_up_proj_scales", gate_up.scales().shallow_clone())
            .with("mlp.experts.down_proj_blocks", down.blocks().shallow_clone())
            .with("mlp.experts.down_proj_scales", down.scales().shallow_clone());
        let dense = with_biases()
            .with("mlp.experts.gate_up_proj", gate_up.unpack(Kind::BFloat16).unwrap())
            .with("mlp.experts.down_proj", down.unpack(Kind::BFloat16).unwrap());
        let x = wave(&[3, 32], Kind::Float);
        let routing = Routing {
            experts: Tensor::from_slice(&[1_i64, 0, 1]).view([3, 1]),
            weights: Tensor::from_slice(&[2.0_f32, 1.0, 0.5]).view([3, 1]),
        };
        let shape = ExpertShape {
            experts: 0..2,
            gate_up: GateUp::Interleaved,
            activation: ExpertActivation::ClampedSwiglu { alpha: 1.702, limit: 7.0 },
        };
        let run = |tensors: &NamedTensors| {
            let scope = BlockScope { adapter: Some(&Factors), ..scope(tensors, &residents) };
            scope.experts("mlp.experts", &x, &routing, &shape, None)
        };
        let output = run(&packed).unwrap();
        assert_eq!(output, run(&dense).unwrap());
        let without = BlockScope { adapter: None, ..scope(&dense, &residents) };
        assert_eq!(output, without.experts("mlp.experts", &x, &routing, &shape, None).unwrap());

        let bad = NamedTensors::new()
            .with("mlp.experts.gate_up_proj_blocks", gate_up.blocks().shallow_clone());
        let error = run(&bad).unwrap_err().to_string();
        for part in ["'layers.3'", "'mlp.experts.gate_up_proj_scales'", "nor a"] {
            assert!(error.contains(part), "{error}");
        }
        let bad = bad.with("mlp.experts.gate_up_proj_scales", gate_up.scales().narrow(1, 0, 3));
        let error = run(&bad).unwrap_err().to_string();
        for part in ["'layers.3'", "'mlp.experts.gate_up_proj_scales'", "[2, 3, 1]"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
